"""Which harness works at a run: one at a time, whatever directory it runs in.

The owner stands in the run's row. On its own machine it is believed for as long as its process lives, so that the next
start takes over at once after kill -9; elsewhere for as long as it gave a sign of life within STALE_SECONDS, by the
database's clock. Left out: fencing. An owner that was cut off learns that it was replaced at its next sign of life.
"""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Connection, func, null, select, update

from proxy.pool.database import Pool, locked, retried
from proxy.pool.errors import PoolError, UserError
from proxy.pool.rollouts.runs import Run
from proxy.pool.schema import runs

BEAT_SECONDS = 10
STALE_SECONDS = 60


class OwnerProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process at work on a run, or serving a pool."""

    token: str
    """New for every claim."""
    host: str
    machine: str
    """Boot and process namespace: where `pid` means the same process."""
    pid: int
    started: str
    """When the process began, in the kernel's words: pids are used again."""


class RunClaim:
    """The hold of this process on a run."""

    def __init__(self, pool: Pool, run: Run, owner: OwnerProcess):
        self._pool = pool
        self.run = run
        self._owner = owner

    async def keep(self) -> None:
        """Give signs of life until cancelled; UserError when another process has taken the run over."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            if not await asyncio.to_thread(self.renew):
                raise UserError(
                    f"run {self.run.name!r} was taken over by another harness, because this one gave no sign of life "
                    f"for {STALE_SECONDS} s; wait for that one, then repeat the same command"
                )

    def renew(self) -> bool:
        """One sign of life. False when the run has another owner now."""
        return _change(self._pool, self.run, self._owner, {"owner": msgspec.to_builtins(self._owner)})

    def release(self) -> None:
        _change(self._pool, self.run, self._owner, {"owner": null()})


@contextmanager
def owned(pool: Pool, run: Run) -> Iterator[RunClaim]:
    """Hold a run for as long as the block lasts; UserError when another process is at work on it."""
    claim = RunClaim(pool, run, _claim(pool, run))
    try:
        yield claim
    finally:
        with suppress(PoolError):  # the database is gone: the next start sees that this process is
            claim.release()


@retried
def _claim(pool: Pool, run: Run) -> OwnerProcess:
    me = this_process()
    with pool.write() as connection:
        [row] = locked(connection, select(runs.c.owner, runs.c.owner_seen_at).where(runs.c.id == run.id))
        now = database_time(connection, pool)
        if row.owner is not None:
            holder = msgspec.convert(row.owner, OwnerProcess)
            if is_alive(holder, me, now - row.owner_seen_at):
                raise UserError(
                    f"run {run.name!r} of the pool {pool.name} is at work in process {holder.pid} on {holder.host}; "
                    "wait for it, stop it, or choose another --name"
                )
        values = {"owner": msgspec.to_builtins(me), "owner_seen_at": now}
        connection.execute(update(runs).where(runs.c.id == run.id).values(values))
    return me


@retried
def _change(pool: Pool, run: Run, owner: OwnerProcess, values: dict[str, Any]) -> bool:
    """Write to the row of a run if it is still this owner's."""
    with pool.write() as connection:
        [row] = locked(connection, select(runs.c.owner).where(runs.c.id == run.id))
        if row.owner is None or row.owner["token"] != owner.token:
            return False
        values = values | {"owner_seen_at": database_time(connection, pool)}
        connection.execute(update(runs).where(runs.c.id == run.id).values(values))
        return True


def is_alive(holder: OwnerProcess, me: OwnerProcess, silent_seconds: float) -> bool:
    """Whether a process still lives: exact on its own machine, by its last sign of life elsewhere."""
    if holder.machine == me.machine:
        return _started(holder.pid) == holder.started
    return silent_seconds < STALE_SECONDS


def this_process() -> OwnerProcess:
    """A new owner: this process."""
    pid = os.getpid()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return OwnerProcess(
        token=secrets.token_hex(8), host=socket.gethostname(), machine=machine, pid=pid, started=_started(pid)
    )


def _started(pid: int) -> str:
    """When a process began, in clock ticks since the boot; empty when there is none, or only its zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def database_time(connection: Connection, pool: Pool) -> float:
    """The time by the one clock that all machines share: the database's. SQLite's is this machine's."""
    if pool.dialect == "sqlite":
        return time.time()
    return float(connection.scalar(select(func.extract("epoch", func.clock_timestamp()))) or 0)
