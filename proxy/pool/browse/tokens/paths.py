"""The token path of one completion, from the rows that it consists of."""

from array import array
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from sqlalchemy import Connection, Row, select

from proxy.pool.completions.records import floats, int_bytes, ints
from proxy.pool.errors import NotInPool
from proxy.pool.schema import completions

MOST_LINKS = 20_000
"""Completions of one path."""


@dataclass(frozen=True)
class Sampled:
    """The answer of one completion, as far as it is part of a path."""

    completion: int
    ordinal: int
    """Its number in the attempt."""
    start: int
    """Its place in the path."""
    tokens: int
    logprobs: "array[float]"
    versions: list[tuple[str, int, int]]
    given: list[tuple[int, int]]


@dataclass(frozen=True)
class TokenPath:
    """A token path."""

    completion: int
    attempt_id: int
    proxy_id: int | None
    prompt_length: int
    tokens: "array[int]"
    answers: list[Sampled]
    """The completions whose answers are part of it, in order; the last one is its own."""
    intact: bool
    """Whether the tokens match the checksum that was taken when they were served."""


def path_of(connection: Connection, completion_id: int) -> TokenPath:
    """Return the path of a completion. NotInPool when the pool does not have it."""
    rows = {row.id: row for row in connection.execute(_links(completion_id))}
    if completion_id not in rows:
        raise NotInPool(f"the pool has no completion {completion_id}; it may have left for an archive")
    own = row = rows[completion_id]
    limit = _end(row)
    parts: list[array[int]] = []
    answers: list[Sampled] = []
    while True:
        new = ints(row.prompt_tail) + ints(row.sampled)
        parts.append(new[: max(0, limit - row.prefix_length)])
        start = _end(row) - len(row.sampled) // 4
        if limit > start:
            answers.append(_sampled(row, start, limit - start))
        limit = min(limit, row.prefix_length)
        if row.prefix_of is None or not limit or row.prefix_of not in rows:
            break
        row = rows[row.prefix_of]
    tokens = array("i")
    for part in reversed(parts):
        tokens += part
    return TokenPath(
        completion=completion_id,
        attempt_id=own.attempt_id,
        proxy_id=own.proxy_id,
        prompt_length=_end(own) - len(own.sampled) // 4,
        tokens=tokens,
        answers=answers[::-1],
        intact=crc32(int_bytes(tokens)) == own.path_crc,
    )


def _end(row: Row[Any]) -> int:
    return int(row.prefix_length) + (len(row.prompt_tail) + len(row.sampled)) // 4


def _sampled(row: Row[Any], start: int, tokens: int) -> Sampled:
    return Sampled(
        completion=row.id,
        ordinal=row.ordinal,
        start=start,
        tokens=tokens,
        logprobs=floats(row.logprobs),
        versions=[(str(name), int(first), int(end)) for name, first, end in row.versions],
        given=[(int(first), int(end)) for first, end in row.given or ()],
    )


def _links(completion_id: int) -> Any:
    """Select the rows of a completion and of those that its prompt begins with."""
    chain = (
        select(completions.c.id, completions.c.prefix_of).where(completions.c.id == completion_id).cte(recursive=True)
    )
    before = select(completions.c.id, completions.c.prefix_of).join(chain, completions.c.id == chain.c.prefix_of)
    chain = chain.union(before)
    columns = (
        completions.c.id, completions.c.attempt_id, completions.c.ordinal, completions.c.proxy_id,
        completions.c.prefix_of, completions.c.prefix_length, completions.c.prompt_tail, completions.c.sampled,
        completions.c.given, completions.c.logprobs, completions.c.versions, completions.c.path_crc,
    )  # fmt: skip
    return select(*columns).join(chain, chain.c.id == completions.c.id).limit(MOST_LINKS)
