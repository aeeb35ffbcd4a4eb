"""Writing and reading completions. Writes of concurrent calls share commits; reads rebuild the token paths."""

import asyncio
from array import array
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import msgspec
from sqlalchemy import Connection, Row, bindparam, func, insert, null, select, update

from proxy.pool.completions import observed
from proxy.pool.completions.labels import LABELS, labels
from proxy.pool.completions.records import (
    Completion,
    NewCompletion,
    RequestShape,
    VersionSpan,
    float_bytes,
    floats,
    int_bytes,
    ints,
)
from proxy.pool.completions.responses import insert_response
from proxy.pool.completions.routed_experts import pack, unpack
from proxy.pool.completions.sqlite_statement import SqliteStatement
from proxy.pool.database import Pool, for_update, retried
from proxy.pool.errors import AttemptClosed, PoolWriteError
from proxy.pool.schema import attempts, completions
from proxy.pool.untrained import Untrained

IDS_PER_QUERY = 10_000
"""Ids per statement: databases limit its parameters (SQLite 32766, PostgreSQL 65535)."""

# Statements of every commit, built once: SQLAlchemy takes longer to build them than SQLite to run them.
_named = attempts.c.id.in_(bindparam("ids", expanding=True))
_open = attempts.c.closed_at.is_(None)
OPEN = for_update(select(attempts.c.id).where(_named, _open).order_by(attempts.c.id))
_last = select(func.max(completions.c.ordinal)).where(completions.c.attempt_id == attempts.c.id)
LAST = select(attempts.c.id, _last.scalar_subquery()).where(_named, _open)
INSERT = insert(completions).returning(completions.c.id, sort_by_parameter_order=True)
_one = attempts.c.id == bindparam("attempt_id")
LAST_OF_ONE = SqliteStatement(select(attempts.c.id, _last.scalar_subquery()).where(_one, _open), ["attempt_id"])
INSERT_ONE = SqliteStatement(
    insert(completions).returning(completions.c.id),
    [column.name for column in completions.c if column.name not in ("id", "label")],
)

Waiting = tuple[NewCompletion, "asyncio.Future[int]"]


class CompletionWriter:
    """Writes completions in shared commits: those that arrive while a transaction is written wait for the next one."""

    def __init__(
        self, pool: Pool, proxy_id: int | None = None, on_commit: Callable[[int], None] = lambda completion_id: None
    ):
        """`proxy_id`: the proxy that serves these completions.

        `on_commit` is called with the id of each new completion, in the event loop, before `add` returns.
        """
        self._pool = pool
        self._proxy_id = proxy_id
        self._on_commit = on_commit
        self._waiting: list[Waiting] = []
        self.uncommitted = 0
        """Number of completions that were added and are not committed yet."""
        self._thread = ThreadPoolExecutor(1, "pool-writer")
        self._flusher: asyncio.Task[None] | None = None

    async def add(self, completion: NewCompletion) -> int:
        """Store a completion and return its id once it is committed.

        Raises AttemptClosed when the attempt has ended, PoolWriteError when the database refused the write.
        """
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((completion, future))
        if self._flusher is None or self._flusher.done():
            self._flusher = asyncio.create_task(self._flush())
        self.uncommitted += 1
        return await future

    async def close(self) -> None:
        """Wait until everything that was added is committed."""
        if self._flusher is not None:
            await self._flusher
        self._thread.shutdown()

    async def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            results = await loop.run_in_executor(self._thread, self._committed, [item for item, _ in batch])
            self.uncommitted -= len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if isinstance(result, int):
                    self._on_commit(result)
                _resolve(future, result)

    def _committed(self, batch: list[NewCompletion]) -> list[int | Exception]:
        """Write completions and return for each its id or its error. A row that cannot be written fails alone."""
        try:
            return self._commit(batch)
        except PoolWriteError as error:
            return [error] * len(batch)
        except Exception as error:  # whatever broke the commit, each caller must get an answer
            if len(batch) == 1:
                return [PoolWriteError(str(error))]
            return [result for item in batch for result in self._committed([item])]

    @retried
    def _commit(self, batch: list[NewCompletion]) -> list[int | Exception]:
        with self._pool.write() as connection:
            next_ordinal = _open_attempts(connection, {item.attempt_id for item in batch})
            rows = []
            for item in batch:
                if item.attempt_id in next_ordinal:
                    rows.append(to_row(item) | {"ordinal": next_ordinal[item.attempt_id], "proxy_id": self._proxy_id})
                    next_ordinal[item.attempt_id] += 1
            new_ids = _inserted(connection, rows)
            stored = [item for item in batch if item.attempt_id in next_ordinal]
            for id, item in zip(new_ids, stored, strict=True):
                if item.response is not None:
                    insert_response(connection, item.attempt_id, id, item.response)
            ids = iter(new_ids)
            closed = "attempt {} has ended, so its key is revoked; open a new attempt"
            return [
                next(ids) if item.attempt_id in next_ordinal else AttemptClosed(closed.format(item.attempt_id))
                for item in batch
            ]


def _resolve(future: "asyncio.Future[int]", result: int | Exception) -> None:
    if future.cancelled():  # the caller is gone; the row is stored anyway
        return
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)


def _open_attempts(connection: Connection, ids: set[int]) -> dict[int, int]:
    """Return the next ordinal of each of these attempts that is still open."""
    rows: Iterable[Any]
    if connection.dialect.name == "sqlite":
        rows = [row for id in ids for row in LAST_OF_ONE.rows(connection, {"attempt_id": id})]
    else:
        # PostgreSQL locks the attempts before it reads their ordinals, so that two proxies cannot take the same ordinal
        # and no attempt closes in between. SQLite has one writer at a time.
        open_ids = list(connection.execute(OPEN, {"ids": sorted(ids)}).scalars())
        rows = connection.execute(LAST, {"ids": open_ids})
    return {id: 0 if last is None else last + 1 for id, last in rows}


def _inserted(connection: Connection, rows: Sequence[dict[str, Any]]) -> Sequence[int]:
    """Insert completions and return their ids in the same order."""
    if connection.dialect.name == "sqlite":
        return [id for row in rows for (id,) in INSERT_ONE.rows(connection, row)]
    return connection.execute(INSERT, rows).scalars().all() if rows else ()


def to_row(item: NewCompletion) -> dict[str, Any]:
    """Return the columns of a completion, without id and ordinal."""
    return {
        "attempt_id": item.attempt_id,
        "prefix_of": item.prefix_of,
        "prefix_length": item.prefix_length,
        "follows": item.follows,
        "prompt_tail": int_bytes(item.prompt_tail),
        "sampled": int_bytes(item.sampled),
        "given": [list(span) for span in item.given] or None,
        "logprobs": float_bytes(item.logprobs),
        "versions": [[span.version, span.start, span.end] for span in item.versions],
        "finish_reason": item.finish_reason,
        "untrainable": None if item.untrainable is None else item.untrainable.reason,
        "untrainable_detail": None if item.untrainable is None else item.untrainable.detail or None,
        "reply": item.reply,
        "path_crc": item.path_crc,
        "started_at": item.started_at,
        "finished_at": item.finished_at,
        "queued_seconds": item.queued_seconds,
        "fingerprint": item.fingerprint or None,
        "shape": None if item.shape is None else msgspec.to_builtins(item.shape),
        "experts": None if item.experts is None else pack(item.experts),
        "misfit": item.misfit,
        "observed": None if item.observed is None else observed.pack(item.observed),
    }


def from_row(row: Row[Any]) -> Completion:
    """Return the completion of a row."""
    return Completion(
        id=row.id,
        attempt_id=row.attempt_id,
        ordinal=row.ordinal,
        prefix_of=row.prefix_of,
        prefix_length=row.prefix_length,
        follows=row.follows,
        prompt_tail=ints(row.prompt_tail),
        sampled=ints(row.sampled),
        given=tuple((start, end) for start, end in row.given or ()),
        logprobs=floats(row.logprobs),
        versions=tuple(VersionSpan(*span) for span in row.versions),
        finish_reason=row.finish_reason,
        untrainable=Untrained.from_columns(row.untrainable, row.untrainable_detail),
        reply=row.reply,
        path_crc=row.path_crc,
        started_at=row.started_at,
        finished_at=row.finished_at,
        queued_seconds=row.queued_seconds,
        fingerprint=row.fingerprint or b"",
        shape=_shape(row.shape),
        experts=None if row.experts is None else unpack(row.experts),
        misfit=row.misfit,
        observed=None if row.observed is None else observed.unpack(row.observed),
        label=row.label,
    )


def _shape(stored: Any) -> RequestShape | None:
    return msgspec.convert(stored, RequestShape | None)


def of_attempt(pool: Pool, attempt_id: int) -> list[Completion]:
    """Return the completions of an attempt in the order of their commits."""
    with pool.read() as connection:
        return of_attempts(connection, [attempt_id])[attempt_id]


def newer(pool: Pool, attempt_id: int, after: int, known: Collection[int]) -> list[Completion]:
    """Return the completions of an attempt with ids above `after`, without the `known`, in the order of commits."""
    query = select(completions).where(completions.c.attempt_id == attempt_id, completions.c.id > after)
    some = query if len(known) > IDS_PER_QUERY else query.where(completions.c.id.not_in(known))
    with pool.read() as connection:
        rows = [from_row(row) for row in connection.execute(some.order_by(completions.c.id))]
    return [row for row in rows if row.id not in known]


def of_attempts(
    connection: Connection, attempt_ids: Sequence[int], experts: bool = True
) -> dict[int, list[Completion]]:
    """Return the completions of each of these attempts in the order of their commits.

    `experts=False` does not load their routed experts, which are many times larger than the rest.
    """
    columns = [column if experts or column.name != "experts" else null().label("experts") for column in completions.c]
    chains: dict[int, list[Completion]] = {attempt_id: [] for attempt_id in attempt_ids}
    for start in range(0, len(attempt_ids), IDS_PER_QUERY):
        some = completions.c.attempt_id.in_(attempt_ids[start : start + IDS_PER_QUERY])
        for row in connection.execute(select(*columns).where(some).order_by(completions.c.id)):
            chains[row.attempt_id].append(from_row(row))
    return chains


# Built once, as CALLS_SEEN in proxy/pool/rollouts/budgets.py is.
UNLABELLED = (
    select(completions.c.id, completions.c.finish_reason, completions.c.shape)
    .where(completions.c.attempt_id == bindparam("of"))
    .order_by(completions.c.id)
)
"""Of the completions of an attempt, what their labels depend on."""
LABEL = update(completions).where(completions.c.id.in_(bindparam("some", expanding=True)))


def write_labels(connection: Connection, attempt_ids: Sequence[int]) -> None:
    """Label the completions of attempts that this transaction has closed, as no further one can join them."""
    for attempt_id in attempt_ids:
        rows = connection.execute(UNLABELLED, {"of": attempt_id})
        by_id = labels([_Unlabelled(row.id, row.finish_reason, _shape(row.shape)) for row in rows])
        for label in LABELS:
            ids = [id for id in by_id if by_id[id] == label]
            for start in range(0, len(ids), IDS_PER_QUERY):
                connection.execute(LABEL, {"some": ids[start : start + IDS_PER_QUERY], "label": label})


@dataclass(frozen=True)
class _Unlabelled:
    """The fields of a completion that its label depends on."""

    id: int
    finish_reason: str
    shape: RequestShape | None


def labelled(chain: Sequence[Completion]) -> list[Completion]:
    """Return the completions; those without a label get the one they would have if their attempt ended now."""
    by_id = labels(chain) if any(item.label is None for item in chain) else {}
    return [replace(item, label=item.label or by_id.get(item.id)) for item in chain]


def paths(chain: Sequence[Completion], known: Mapping[int, "array[int]"] | None = None) -> dict[int, "array[int]"]:
    """Return, by completion id, the whole token path (prompt, then sampled tokens) of completions in commit order.

    `known`: paths of earlier completions of the attempt. ValueError when a path does not match the checksum that was
    taken when it was served.
    """
    whole = token_paths(chain, known)
    for item in chain:
        if crc32(int_bytes(whole[item.id])) != item.path_crc:
            raise ValueError(f"completion {item.id}: its stored tokens do not match checksum {item.path_crc}")
    return whole


def token_paths(
    chain: Sequence[Completion], known: Mapping[int, "array[int]"] | None = None
) -> dict[int, "array[int]"]:
    """Return what `paths` does, without a look at the checksums."""
    whole: dict[int, array[int]] = {}
    before = ChainMap(whole, dict(known or {}))
    for item in chain:
        shared = before[item.prefix_of][: item.prefix_length] if item.prefix_of is not None else array("i")
        whole[item.id] = shared + item.prompt_tail + item.sampled
    return whole
