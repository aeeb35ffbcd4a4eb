"""The owner of a run: the one harness that works on it, whatever its run directory.

The row of the run names its owner. On the same machine, the owner counts as alive as long as its process lives, so the
next start takes over at once after kill -9. Seen from other machines, it counts as alive for STALE_SECONDS after its
last heartbeat, by the clock of the database. Not done: fencing. An owner that was cut off from the database learns at
its next heartbeat that it was replaced.
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

HEARTBEAT_SECONDS = 10
STALE_SECONDS = 60


class PoolProcess(msgspec.Struct, frozen=True, kw_only=True):
    """A process that works on a run or serves a pool."""

    token: str
    """Random, new for every claim."""
    host: str
    machine: str
    """Boot id and process namespace: within them, `pid` identifies a process."""
    pid: int
    started: str
    """When the process started, in clock ticks since boot, because the kernel reuses pids."""


class RunClaim:
    """The claim of this process on a run."""

    def __init__(self, pool: Pool, run: Run, owner: PoolProcess):
        self._pool = pool
        self.run = run
        self._owner = owner

    async def keep(self) -> None:
        """Send heartbeats until cancelled; UserError when another process has taken the run over."""
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            if not await asyncio.to_thread(self.renew):
                raise UserError(
                    f"another harness has taken over run {self.run.name!r}, because this one sent no heartbeat for "
                    f"{STALE_SECONDS} s; wait for that one, then repeat the same command"
                )

    def renew(self) -> bool:
        """Send one heartbeat; return False when the run has another owner now."""
        return _change(self._pool, self.run, self._owner, {"owner": msgspec.to_builtins(self._owner)})

    def release(self) -> None:
        """Give the run up, if this process still owns it."""
        _change(self._pool, self.run, self._owner, {"owner": null()})


@contextmanager
def owned(pool: Pool, run: Run) -> Iterator[RunClaim]:
    """Own a run while the block lasts; UserError when another living process owns it."""
    claim = RunClaim(pool, run, _claim(pool, run))
    try:
        yield claim
    finally:
        with suppress(PoolError):  # the database is gone; the next start sees that this process has ended
            claim.release()


@retried
def _claim(pool: Pool, run: Run) -> PoolProcess:
    me = this_process()
    with pool.write() as connection:
        # The lock decides between two harnesses that start at the same time.
        [row] = locked(connection, select(runs.c.owner, runs.c.owner_seen_at).where(runs.c.id == run.id))
        now = database_time(connection, pool)
        if row.owner is not None:
            holder = msgspec.convert(row.owner, PoolProcess)
            if is_alive(holder, me, now - row.owner_seen_at):
                raise UserError(
                    f"run {run.name!r} of the pool {pool.name} is in use by process {holder.pid} on {holder.host}; "
                    "wait for it, stop it, or choose another --name"
                )
        values = {"owner": msgspec.to_builtins(me), "owner_seen_at": now}
        connection.execute(update(runs).where(runs.c.id == run.id).values(values))
    return me


@retried
def _change(pool: Pool, run: Run, owner: PoolProcess, values: dict[str, Any]) -> bool:
    """Update the row of a run if this owner still owns it; return whether it does."""
    with pool.write() as connection:
        [row] = locked(connection, select(runs.c.owner).where(runs.c.id == run.id))
        if row.owner is None or row.owner["token"] != owner.token:
            return False
        values = values | {"owner_seen_at": database_time(connection, pool)}
        connection.execute(update(runs).where(runs.c.id == run.id).values(values))
        return True


def is_alive(holder: PoolProcess, me: PoolProcess, silent_seconds: float) -> bool:
    """Return whether a process is alive: exactly on its own machine, by its last heartbeat elsewhere."""
    if holder.machine == me.machine:
        return _started(holder.pid) == holder.started
    return silent_seconds < STALE_SECONDS


def this_process() -> PoolProcess:
    """Return this process as an owner with a new token."""
    pid = os.getpid()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return PoolProcess(
        token=secrets.token_hex(8), host=socket.gethostname(), machine=machine, pid=pid, started=_started(pid)
    )


def _started(pid: int) -> str:
    """Return the start of a process in clock ticks since boot; "" when it does not exist or is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def database_time(connection: Connection, pool: Pool) -> float:
    """Return the time of the database's clock, which all machines share. For SQLite it is this machine's."""
    if pool.dialect == "sqlite":
        return time.time()
    return float(connection.scalar(select(func.extract("epoch", func.clock_timestamp()))) or 0)
