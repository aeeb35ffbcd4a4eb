"""The owners of a run: the one harness and the one trainer that work on it, whatever their directories.

The row of the run names both. On the same machine, an owner counts as alive as long as its process lives, so the next
start takes over at once after kill -9. Seen from other machines, or where /proc hides another user's, it counts as
alive for STALE_SECONDS after its last heartbeat, by the clock of the database. A trainer's token is a fencing token:
`demand_trainer` checks it in the transactions that lease and publish, so that a trainer that was replaced cannot change
the run. A harness that was replaced learns it at its next heartbeat. Of its writes, only the closing of all attempts of
a run or rollout is fenced (proxy/pool/rollouts/attempts.py), so that it does not end the work of the new owner.
"""

import asyncio
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import Column, Connection, func, null, select, update

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


@dataclass(frozen=True)
class Role:
    """What a process does for a run, and the columns of `runs` that name who does it."""

    name: str
    column: str
    """Who does it. The column of the last heartbeat has the suffix `_seen_at`."""
    way_out: str
    """What to do instead of waiting for the other one or stopping it."""

    @property
    def columns(self) -> tuple[Column[Any], Column[Any]]:
        """Who does it, and the last heartbeat."""
        return runs.c[self.column], runs.c[f"{self.column}_seen_at"]


HARNESS = Role("harness", "owner", "choose another --name")
TRAINER = Role("trainer", "trainer", "set another run")


class RunClaim:
    """The claim of this process on a run."""

    def __init__(self, pool: Pool, run: Run, owner: PoolProcess, role: Role = HARNESS):
        self._pool = pool
        self.run = run
        self._owner = owner
        self._role = role

    @property
    def token(self) -> str:
        return self._owner.token

    async def keep(self) -> None:
        """Send heartbeats until cancelled; UserError when another process has taken the run over."""
        loop = asyncio.get_running_loop()
        own_thread = ThreadPoolExecutor(1, "heartbeat")  # long work may hold all threads of asyncio
        try:
            while True:
                await asyncio.sleep(HEARTBEAT_SECONDS)
                if not await loop.run_in_executor(own_thread, self.renew):
                    raise _replaced(self._role, self.run.name)
        finally:
            own_thread.shutdown(wait=False)  # a heartbeat may wait for the database, and other tasks have to end

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Send heartbeats from a thread while the block lasts, until another process has taken the run over."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(HEARTBEAT_SECONDS):
                with suppress(PoolError):  # the next heartbeat tries again
                    if not self.renew():
                        return

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def demand(self) -> None:
        """Raise UserError when another process has taken the run over."""
        with self._pool.read() as connection:
            _demand(connection, self.run.id, self._role, self.token)

    def renew(self) -> bool:
        """Send one heartbeat; return False when the run has another owner now."""
        return self._change(msgspec.to_builtins(self._owner))

    def release(self) -> None:
        """Give the run up, if this process still owns it."""
        self._change(null())

    @retried
    def _change(self, owner: Any) -> bool:
        """Update the run's row if this process still owns the run; return whether it does."""
        holder_column, seen_column = self._role.columns
        with self._pool.write() as connection:
            [row] = locked(connection, select(holder_column).where(runs.c.id == self.run.id))
            holder = row[0]
            if holder is None or holder["token"] != self.token:
                return False
            values = {holder_column: owner, seen_column: database_time(connection, self._pool)}
            connection.execute(update(runs).where(runs.c.id == self.run.id).values(values))
            return True


@contextmanager
def owned(pool: Pool, run: Run, role: Role = HARNESS, wait_seconds: float = 0) -> Iterator[RunClaim]:
    """Own a run while the block lasts; UserError when another living process owns it.

    `wait_seconds`: how long to wait for that one, because a process that was just killed may linger.
    """
    claim = RunClaim(pool, run, _claim_within(pool, run, role, wait_seconds), role)
    try:
        yield claim
    finally:
        with suppress(PoolError):  # the database is gone; the next start sees that this process has ended
            claim.release()


def demand_trainer(connection: Connection, run_id: int, token: str | None) -> None:
    """Raise UserError unless the run's trainer has this token. None: no trainer must own the run.

    In a write transaction, lock the run first: then no other trainer can take it over before the commit.
    """
    _demand(connection, run_id, TRAINER, token)


def _demand(connection: Connection, run_id: int, role: Role, token: str | None) -> None:
    query = select(runs.c.name, role.columns[0]).where(runs.c.id == run_id)
    name, holder = connection.execute(query).one()
    if (holder and holder["token"]) != token:
        raise _replaced(role, name)


def _replaced(role: Role, run: str) -> UserError:
    return UserError(
        f"another {role.name} has taken over run {run!r}, because this one sent no heartbeat for "
        f"{STALE_SECONDS} s; wait for that one, then repeat the same command"
    )


def _claim_within(pool: Pool, run: Run, role: Role, seconds: float) -> PoolProcess:
    deadline = time.monotonic() + seconds
    while True:
        try:
            return _claim(pool, run, role)
        except UserError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


@retried
def _claim(pool: Pool, run: Run, role: Role) -> PoolProcess:
    me = this_process()
    holder_column, seen_column = role.columns
    with pool.write() as connection:
        # The lock decides between two processes that start at the same time.
        columns = holder_column.label("owner"), seen_column.label("seen_at")
        [row] = locked(connection, select(*columns).where(runs.c.id == run.id))
        now = database_time(connection, pool)
        if row.owner is not None:
            holder = msgspec.convert(row.owner, PoolProcess)
            if is_alive(holder, me, now - row.seen_at):
                raise UserError(
                    f"run {run.name!r} of the pool {pool.name} is in use by process {holder.pid} on "
                    f"{holder.host}, a {role.name}; wait for it, stop it, or {role.way_out}"
                )
        values = {holder_column: msgspec.to_builtins(me), seen_column: now}
        connection.execute(update(runs).where(runs.c.id == run.id).values(values))
    return me


def is_alive(holder: PoolProcess, me: PoolProcess, silent_seconds: float) -> bool:
    """Return whether a process is alive: exactly on its own machine, by its last heartbeat elsewhere or if hidden."""
    if holder.machine == me.machine and not _is_hidden(holder.pid):
        return _started(holder.pid) == holder.started
    return silent_seconds < STALE_SECONDS


def is_attended(pool: Pool, run_id: int) -> bool:
    """Return whether a harness works at the run."""
    with pool.read() as connection:
        return attended(connection, pool, run_id)


def attended(connection: Connection, pool: Pool, run_id: int) -> bool:
    """Return whether a harness works at the run, as a transaction sees it."""
    query = select(runs.c.owner, runs.c.owner_seen_at).where(runs.c.id == run_id)
    holder, seen_at = connection.execute(query).one()
    if holder is None:
        return False
    silent_seconds = database_time(connection, pool) - seen_at
    return is_alive(msgspec.convert(holder, PoolProcess), this_process(), silent_seconds)


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
    fields = _stat(pid)
    return "" if not fields or fields[0] in "ZX" else fields[19]


def _is_hidden(pid: int) -> bool:
    """Return whether another user's process has this pid and /proc hides it (mounted with hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return not _stat(pid)
    except ProcessLookupError:
        return False
    return False


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; none when it does not exist or is hidden."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def database_time(connection: Connection, pool: Pool) -> float:
    """Return the time of the database's clock, which all machines share. For SQLite it is this machine's."""
    if pool.dialect == "sqlite":
        return time.time()
    return float(connection.scalar(select(func.extract("epoch", func.clock_timestamp()))) or 0)
