"""The log of an attempt: what its agent printed, in the run's directory. Where that is elsewhere, there is no log here.

The harness writes it when the agent has ended. Left out: what the sandbox itself did.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from proxy.pool.browse.run_dirs import run_directories
from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.errors import NotInPool, UserError
from proxy.pool.input_files import open_input
from proxy.pool.processes.owners import attended
from proxy.pool.schema import attempts, runs
from proxy.pool.training.evaluations import what_it_evaluates

PIECE = 100_000
"""Bytes of a log that are read at once."""
BLOCK = 512
"""Bytes from which on a block ends with its line. An address names a place in a log by a block."""


@dataclass(frozen=True)
class LogBlock:
    """Some lines of a log, which begin at the byte `offset`. The first and the last one of a piece may be cut."""

    offset: int
    text: str


@dataclass(frozen=True)
class LogPiece:
    """Bytes [offset, next) of a log."""

    blocks: list[LogBlock]
    offset: int
    next: int
    """Where the next piece begins."""
    total: int
    file: str
    missing: str
    """Why there is no log here; "": there is."""


def log_piece(pool: Pool, attempt_id: int, offset: int | None = None, until: int | None = None) -> LogPiece:
    """Return a piece of an attempt's log: its bytes from `offset` to `until`, at most PIECE; by default its end.

    NotInPool when there is no such attempt.
    """
    query = select(attempts.c.closed_at, attempts.c.run_id, runs.c.name, runs.c.config)
    query = query.outerjoin(runs, runs.c.id == attempts.c.run_id)
    with snapshot(pool) as connection:
        row = connection.execute(query.where(attempts.c.id == attempt_id)).one_or_none()
        if row is None:
            raise NotInPool(f"the pool has no attempt {attempt_id}; the pages of its rollouts list those that it has")
        if row.name is None:
            return _none("the output of a session's agent is not kept: it ran on its own")
        live = row.closed_at is None and attended(connection, pool, row.run_id)
    of = what_it_evaluates(row.config)  # an evaluation has its logs where those of its training run are
    directories = run_directories(pool, row.name if of is None else of.run)
    for directory in directories:
        file = directory / "logs" / f"attempt-{attempt_id}.log"
        with suppress(OSError, UserError):
            return _piece(file, offset, until)
    if directories and live:
        return _none("the agent's output comes when the agent has ended")
    if directories:
        why = "its agent did not start, or was cut off, or the file was deleted"
        return _none(f"{directories[0]}/logs has no output of this attempt: {why}")
    return _none("the directory of the run is not on this machine, and no directory beside its pool is the run's")


def _piece(file: Path, offset: int | None, until: int | None) -> LogPiece:
    with open_input(file, follow=False) as log:
        total = log.seek(0, 2)
        start = max(0, total - PIECE) if offset is None else min(offset, total)
        log.seek(start)
        data = log.read(PIECE if until is None else max(0, min(PIECE, until - start)))
    return LogPiece(list(_blocks(data, start)), start, start + len(data), total, str(file), "")


def _blocks(data: bytes, start: int) -> Iterator[LogBlock]:
    begin = 0
    while begin < len(data):
        line = data.find(b"\n", begin + BLOCK)
        end = len(data) if line < 0 else line + 1
        yield LogBlock(start + begin, data[begin:end].decode(errors="replace"))
        begin = end


def _none(why: str) -> LogPiece:
    return LogPiece([], 0, 0, 0, "", why)
