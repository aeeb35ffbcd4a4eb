"""The labels on every container, network, volume and image that we create, by which they are listed and removed.

An owner is a process, identified by its host, that host's boot, its pid and start time. A pid alone is reused, and a
daemon may serve several hosts, each of which can check only its own processes. Left out: what to do about it
(`sandboxes gc`).
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sandboxes.base import Spec
from sandboxes.local.processes import hidden, start_of

PREFIX = "blackforge."
KIND = PREFIX + "kind"
"""Purpose of a resource: sandbox, relay, bundle, image, ... Every resource with this label is ours."""
SHARED = ("bundle",)
"""Kinds of volumes that outlive their owner on purpose: other runs use them."""
SANDBOX = PREFIX + "sandbox"
RUN = PREFIX + "run"
IMAGE = PREFIX + "image"
PROFILE = PREFIX + "profile"
NETWORK = PREFIX + "network"
RELAXED = PREFIX + "relaxed"
"""The limits that the task has relaxed, as `name=value` separated by blanks."""
HOST, BOOT, PID, STARTED = (PREFIX + name for name in ("host", "boot", "pid", "started"))


@dataclass(frozen=True)
class ResourceOwner:
    """The process that a resource belongs to. When it ends, the resource is an orphan."""

    host: str
    boot: str
    """The boot and the process namespace in which `pid` names the process; empty where the system does not tell."""
    pid: int
    started: int
    """Clock ticks since boot; 0 where the system does not tell."""

    def labels(self) -> dict[str, str]:
        return {HOST: self.host, BOOT: self.boot, PID: str(self.pid), STARTED: str(self.started)}

    def alive(self, local: bool = False) -> bool | None:
        """Return whether it runs; None when that cannot be checked from here.

        `local`: its resources are on a daemon that only this machine uses, so an owner of another boot is dead. With a
        remote daemon, the owner may be on another machine of the same name.
        """
        here = this_process()
        if not self.boot:
            return None
        if self.boot == here.boot:
            return None if hidden(self.pid) else start_of(self.pid) == self.started
        other_boot = self.boot.split(" ")[0] != here.boot.split(" ")[0]
        return False if local and other_boot and self.host == here.host else None


def this_process() -> ResourceOwner:
    """Return this process as an owner."""
    return ResourceOwner(socket.gethostname(), _boot(), os.getpid(), start_of(os.getpid()) or 0)


def read_owner(labels: Mapping[str, str]) -> ResourceOwner | None:
    """Return the owner that the labels name; None when the resource is not ours."""
    try:
        return ResourceOwner(labels[HOST], labels[BOOT], int(labels[PID]), int(labels[STARTED]))
    except (KeyError, ValueError):
        return None


def labels_of(kind: str, owner: ResourceOwner, run: str = "") -> dict[str, str]:
    """Return the labels of every resource."""
    return {KIND: kind, RUN: run} | owner.labels()


def sandbox_labels(sandbox: str, spec: Spec, image: str) -> dict[str, str]:
    """Return the further labels of a sandbox's container."""
    return {
        SANDBOX: sandbox,
        IMAGE: image,
        PROFILE: spec.profile,
        NETWORK: spec.network,
        RELAXED: " ".join(relaxed(spec)),
    }


def relaxed(spec: Spec) -> list[str]:
    """Return what a spec allows beyond the strictest, each as `name=value`."""
    strict = Spec()
    allowed = [f"profile={spec.profile}"] if spec.profile != strict.profile else []
    allowed += ["network=full"] if spec.network == "full" else []
    allowed += [f"system_calls={','.join(spec.system_calls)}"] if spec.system_calls else []
    limits = {"memory_mb": (spec.memory_mb, strict.memory_mb), "pids": (spec.pids, strict.pids)}
    for name, (value, usual) in (limits | {"disk_mb": (spec.disk_mb, strict.disk_mb)}).items():
        if usual is not None and (value is None or value > usual):
            allowed.append(f"{name}={'unlimited' if value is None else value}")
    return allowed


def _boot() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""
