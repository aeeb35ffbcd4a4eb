"""The labels on every container, network, volume and image that we make, by which they are listed and reaped.

An owner is a process: its host, that host's boot, its pid and start time. A pid alone is given out again, and a daemon
may serve several hosts, of which each can tell only for its own processes whether they are alive. Left out: judging
what to do about it (`sandboxes gc` does).
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
"""What the thing is for: sandbox, relay, bundle, image, ... Whatever carries this label is ours."""
SHARED = ("bundle",)
"""Kinds of volumes that outlive their maker on purpose: other runs use them."""
SANDBOX = PREFIX + "sandbox"
RUN = PREFIX + "run"
IMAGE = PREFIX + "image"
PROFILE = PREFIX + "profile"
NETWORK = PREFIX + "network"
RELAXED = PREFIX + "relaxed"
"""Which of the strictest limits the task has relaxed, as `name=value` separated by blanks."""
HOST, BOOT, PID, STARTED = (PREFIX + name for name in ("host", "boot", "pid", "started"))


@dataclass(frozen=True)
class OwnerProcess:
    """The process whose end makes a thing an orphan."""

    host: str
    boot: str
    """The boot and the process namespace in which `pid` means the same process; empty where the system does not say."""
    pid: int
    started: int
    """Clock ticks since boot; 0 where the system does not say."""

    def labels(self) -> dict[str, str]:
        return {HOST: self.host, BOOT: self.boot, PID: str(self.pid), STARTED: str(self.started)}

    def alive(self, local: bool = False) -> bool | None:
        """Whether it runs; None when that cannot be told from here.

        `local`: what it made is on a daemon of this machine alone, so that an owner of another boot is dead. On a
        remote one, it may be another machine of the same name.
        """
        here = this_process()
        if not self.boot:
            return None
        if self.boot == here.boot:
            return None if hidden(self.pid) else start_of(self.pid) == self.started
        other_boot = self.boot.split(" ")[0] != here.boot.split(" ")[0]
        return False if local and other_boot and self.host == here.host else None


def this_process() -> OwnerProcess:
    """The owner of what this process makes."""
    return OwnerProcess(socket.gethostname(), _boot(), os.getpid(), start_of(os.getpid()) or 0)


def read_owner(labels: Mapping[str, str]) -> OwnerProcess | None:
    """The owner that the labels name; None when the thing is not ours."""
    try:
        return OwnerProcess(labels[HOST], labels[BOOT], int(labels[PID]), int(labels[STARTED]))
    except (KeyError, ValueError):
        return None


def labels_of(kind: str, owner: OwnerProcess, run: str = "") -> dict[str, str]:
    """What everything carries."""
    return {KIND: kind, RUN: run} | owner.labels()


def sandbox_labels(sandbox: str, spec: Spec, image: str) -> dict[str, str]:
    """What a sandbox's container carries besides."""
    return {
        SANDBOX: sandbox,
        IMAGE: image,
        PROFILE: spec.profile,
        NETWORK: spec.network,
        RELAXED: " ".join(relaxed(spec)),
    }


def relaxed(spec: Spec) -> list[str]:
    """What a spec allows beyond the strictest: each as `name=value`."""
    strict = Spec()
    allowed = [f"profile={spec.profile}"] if spec.profile != strict.profile else []
    allowed += ["network=full"] if spec.network == "full" else []
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
