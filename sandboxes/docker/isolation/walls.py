"""Adds to the description of a container what keeps it apart from its host beyond its profile."""

from collections.abc import Mapping
from typing import Any

from sandboxes.base import Profile
from sandboxes.docker.isolation.system_calls import security_option


def with_walls(
    config: Mapping[str, Any], seccomp: bool, profile: Profile, allowed: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return the description with our filter of system calls, where the daemon has seccomp."""
    host = dict(config["HostConfig"])
    options = [*host.get("SecurityOpt", ()), *([security_option(profile, allowed)] if seccomp else [])]
    return {**config, "HostConfig": host | {"SecurityOpt": options}}
