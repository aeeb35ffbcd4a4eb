"""Turns a spec into the description of a container: what each profile permits.

strict  The agent and the verifier are two unprivileged users that own nothing but their homes and, the agent, the
        working directory. They have no capability and cannot gain one. Root keeps four, for our own commands: to end
        any process and to change the owner of files. The root file system is read-only; writable places are in memory,
        with a size limit.
harbor  Everybody is root, with the capabilities that package managers and daemons need, on a writable root file system
        of unlimited size. On a daemon with userns-remap that root is unprivileged outside; else it is the host's root
        within the container's namespaces, seccomp filter and capabilities.

Neither stops a fault in the kernel or the container runtime, nor a sandbox that slows others down where `cpus` is not
set. Files written in a strict sandbox count as its memory.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandboxes.base import SandboxError, Spec, User
from sandboxes.docker.wiring import Supply
from sandboxes.local.system_calls import environment

AGENT, VERIFIER = 10000, 10001
"""uid and gid of each, above those that distributions use."""
STRICT_ROOT = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL")
HARBOR_ROOT = (*STRICT_ROOT, "FSETID", "SETGID", "SETUID", "SYS_CHROOT", "NET_BIND_SERVICE", "AUDIT_WRITE")
SLEEPER = ("/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 86400 & wait $!; done")
USUAL = {"LANG": "C.UTF-8", "TERM": "dumb"}
DEFAULT_WORK = "/work"
SYSTEM = {"/", "/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr", "/var"}


@dataclass(frozen=True)
class UserAccount:
    """The account inside a container that a user of the interface has."""

    ids: str
    """uid:gid"""
    name: str
    home: str


_ROOT = UserAccount("0:0", "root", "/root")
ACCOUNTS: Mapping[str, Mapping[User, UserAccount]] = {
    "strict": {
        "agent": UserAccount(f"{AGENT}:{AGENT}", "agent", "/home/agent"),
        "verifier": UserAccount(f"{VERIFIER}:{VERIFIER}", "verifier", "/home/verifier"),
        "root": _ROOT,
    },
    "harbor": {"agent": _ROOT, "verifier": _ROOT, "root": _ROOT},
}


@dataclass(frozen=True, kw_only=True)
class BaseImage:
    """The image that a container starts from."""

    id: str
    name: str
    """Name that the task gives it."""
    work: str
    seeded: bool = False
    """Whether it keeps a copy of the working directory that must be copied into place."""
    variables: frozenset[str] = frozenset()
    """Names of the environment variables that the image sets."""


def working_directory(spec: Spec, of_image: str) -> str:
    """Return where commands run. SandboxError for a directory that a strict sandbox would have to hide."""
    work = spec.work or of_image
    if spec.profile == "harbor":
        return work or "/"
    if not work or (work == "/" and not spec.work):
        return DEFAULT_WORK
    if not work.startswith("/") or (work.rstrip("/") or "/") in SYSTEM:
        raise SandboxError(f"the working directory {work!r} cannot be made writable in profile strict; name another")
    return work.rstrip("/")


def container_config(
    spec: Spec, base: BaseImage, supply: Supply, labels: Mapping[str, str], first_id: int
) -> dict[str, Any]:
    """Return the description from which the daemon's API creates a container.

    `first_id`: the user id on the daemon's machine that is root inside.
    """
    host = limits_of(spec) | _rights(spec)
    volumes = _volumes(spec, base, labels, first_id) if spec.profile == "strict" else []
    host |= {
        "NetworkMode": "none" if spec.network == "full" else supply.network or "none",
        "ExtraHosts": [f"{service.name}:127.0.0.1" for service in spec.services],
        "Mounts": [*volumes, *supply.mounts],
        "Init": True,
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m"}},
    }
    main = list(supply.main or SLEEPER)
    usual = USUAL | (environment(spec.system_calls) if spec.profile == "strict" else {})
    usual = {name: value for name, value in usual.items() if name not in base.variables}
    env = usual | dict(supply.env) | dict(spec.env)
    return {
        "Image": base.id,
        "Entrypoint": main[:1],
        "Cmd": main[1:],
        "User": "0:0",
        "WorkingDir": base.work,  # the daemon creates it where the image lacks it
        "Hostname": "sandbox",
        "Env": [f"{name}={value}" for name, value in env.items()],
        "Labels": dict(labels),
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
    }


def limits_of(spec: Spec) -> dict[str, Any]:
    """Return the limits of one container, for its HostConfig."""
    memory = 0 if spec.memory_mb is None else spec.memory_mb << 20
    return {
        "Memory": memory,
        "MemorySwap": memory,  # no swap besides
        "NanoCpus": 0 if spec.cpus is None else int(spec.cpus * 1e9),
        "PidsLimit": -1 if spec.pids is None else spec.pids,
        "OomScoreAdj": 500,  # when the host runs out of memory, sandboxes go before what serves them
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
    }


def writable_places(base: BaseImage) -> dict[str, tuple[str, int]]:
    """Return the places of a strict sandbox that can be written: path -> mode and owner."""
    homes = {ACCOUNTS["strict"]["agent"].home: ("0700", AGENT), ACCOUNTS["strict"]["verifier"].home: ("0700", VERIFIER)}
    return {"/tmp": ("1777", 0), **homes, base.work: ("0755", AGENT)}


def _volumes(spec: Spec, base: BaseImage, labels: Mapping[str, str], first_id: int) -> list[dict[str, Any]]:
    """Return the writable places as volumes in memory. The daemon reads them, unlike a mount inside the container.

    They have no name, so they go with the container.
    """
    size = "" if spec.disk_mb is None else f",size={spec.disk_mb}m"
    return [
        {
            "Type": "volume",
            "Target": place,
            "VolumeOptions": {
                "NoCopy": True,
                "Labels": dict(labels),
                "DriverConfig": {
                    "Name": "local",
                    "Options": {
                        "type": "tmpfs",
                        "device": "tmpfs",
                        "o": f"nosuid,nodev,mode={mode},uid={first_id + owner},gid={first_id + owner}{size}",
                    },
                },
            },
        }
        for place, (mode, owner) in writable_places(base).items()
    ]


def _rights(spec: Spec) -> dict[str, Any]:
    if spec.profile == "harbor":
        return {"CapDrop": ["ALL"], "CapAdd": list(HARBOR_ROOT)}
    return {
        "CapDrop": ["ALL"],
        "CapAdd": list(STRICT_ROOT),
        "SecurityOpt": ["no-new-privileges"],
        "ReadonlyRootfs": True,
    }
