"""Adds to the description of a container what keeps it apart from its host beyond its profile."""

from collections.abc import Collection, Mapping
from typing import Any

from sandboxes.base import Profile
from sandboxes.docker.daemon import DockerDaemon
from sandboxes.docker.isolation.system_calls import security_option

NATIVE = ("runc", "crun", "youki", "io.containerd.runc.v2")
"""Runtimes whose containers use the network of their name space. Others (runsc, kata) have one of their own inside,
which other containers do not share and whose routes nobody outside can take away."""


def with_walls(
    config: Mapping[str, Any], seccomp: bool, profile: Profile, allowed: tuple[str, ...] = (), runtime: str = ""
) -> dict[str, Any]:
    """Return the description with our filter of system calls, where the daemon has seccomp, and with its runtime."""
    host = dict(config["HostConfig"])
    options = [*host.get("SecurityOpt", ()), *([security_option(profile, allowed)] if seccomp else [])]
    host |= {"SecurityOpt": options} | ({"Runtime": runtime} if runtime else {})
    return {**config, "HostConfig": host}


def missing_runtime(daemon: DockerDaemon, runtimes: Collection[str]) -> str:
    """Return a sentence about a runtime that the daemon does not have; empty when it has all."""
    missing = sorted({*runtimes} - daemon.runtimes)
    if not missing:
        return ""
    known = ", ".join(sorted(daemon.runtimes))
    return (
        f"the Docker daemon at {daemon.address} has no runtime {missing[0]!r}, only {known}; "
        "install it and name it in the daemon's configuration, or leave out --runtime"
    )
