"""Verification of a pool: the checksum of every token path, and the rules that every row must keep.

Nothing is changed. Damage does not stop it: it reads one attempt at a time and reports each damaged row. Not found:
rows that are missing at the end of an attempt, and changed contents of replies.
"""

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from zlib import crc32

from sqlalchemy import Row, Text, cast, select, union

from proxy.pool.completions.labels import LABELS
from proxy.pool.completions.records import GivenSpan, RequestShape, VersionSpan, floats, int_bytes, ints
from proxy.pool.completions.routed_experts import unpack
from proxy.pool.compressed_json import as_text
from proxy.pool.database import Pool
from proxy.pool.errors import PoolError
from proxy.pool.inspect.verify_responses import decoded, read_responses, response_problems
from proxy.pool.schema import attempts, completions, responses
from proxy.pool.terminal.progress import progress
from proxy.pool.untrained import UntrainedReason

Spans = list[tuple[str, int, int]]
GivenSpans = list[GivenSpan] | None
NUMBER_BYTES = 4
ENCODED = ("versions", "given", "shape")
"""JSON columns that are read as text, like `reply`, so that broken JSON is reported and does not raise."""


@dataclass
class PoolReport:
    """Counts of what was read, and one line for each problem."""

    attempts: int = 0
    completions: int = 0
    trainable: int = 0
    sampled_tokens: int = 0
    damages: list[str] = field(default_factory=list)


@dataclass
class _AttemptPaths:
    """The paths of an attempt's completions so far, by id; None where a path cannot be read."""

    paths: dict[int, "array[int] | None"] = field(default_factory=dict)


def verify(pool: Pool) -> PoolReport:
    """Verify a whole pool, each attempt in a consistent snapshot. Others may write meanwhile. Shows its progress."""
    report = PoolReport()
    with pool.read() as connection:
        tables = (select(table.c.attempt_id) for table in (completions, responses))
        attempt_ids = connection.scalars(union(*tables)).all()
    with progress(f"verifying {pool.name}", len(attempt_ids), "attempts") as advance:
        for attempt_id in sorted(attempt_ids):
            report.attempts += 1
            try:
                _verify_attempt(pool, attempt_id, report)
            except PoolError as error:
                report.damages.append(f"attempt {attempt_id}: {error}")
            advance(1)
    return report


def _verify_attempt(pool: Pool, attempt_id: int, report: PoolReport) -> None:
    raw = [cast(completions.c[name], Text).label(name) for name in ENCODED]
    raw.append(as_text(completions.c.reply, pool.dialect).label("reply"))
    others = [column for column in completions.c if column.name not in (*ENCODED, "reply")]
    query = select(*others, *raw).where(completions.c.attempt_id == attempt_id).order_by(completions.c.id)
    with pool.read() as connection:
        if connection.scalar(select(attempts.c.id).where(attempts.c.id == attempt_id)) is None:
            report.damages.append(f"attempt {attempt_id}: its row is missing")
        rows = connection.execute(query).all()
        stored = read_responses(connection, attempt_id, pool.dialect)
    seen = _AttemptPaths()
    for ordinal, row in enumerate(rows):
        problems = list(_problems(row, seen))
        if row.ordinal != ordinal:
            problems.append(f"its ordinal is {row.ordinal} instead of {ordinal}")
        report.completions += 1
        report.trainable += row.untrainable is None
        if _is_numbers(row.sampled):
            report.sampled_tokens += len(row.sampled) // NUMBER_BYTES - sum(end - start for start, end in _given(row))
        report.damages += [f"attempt {attempt_id}, completion {row.id}: {problem}" for problem in problems]
    replies = {row.id: decoded(row.reply, dict[str, Any]) for row in rows} if stored else {}
    report.damages += [f"attempt {attempt_id}, {problem}" for problem in response_problems(stored, replies)]


def _problems(row: Row[Any], seen: _AttemptPaths) -> Iterator[str]:
    """Yield what is wrong with a completion, given those before it."""
    unreadable = [name for name in ("prompt_tail", "sampled", "logprobs") if not _is_numbers(row._mapping[name])]
    yield from (f"its {name} is no array of {NUMBER_BYTES}-byte numbers" for name in unreadable)
    broken_links = list(_link_problems(row, seen))
    yield from broken_links
    seen.paths[row.id] = None
    if not unreadable and not broken_links:
        shared = (seen.paths[row.prefix_of] or array("i"))[: row.prefix_length] if row.prefix_of else array("i")
        path = shared + ints(row.prompt_tail) + ints(row.sampled)
        seen.paths[row.id] = path
        if crc32(int_bytes(path)) != row.path_crc:
            yield f"its path of {len(path)} tokens does not match checksum {row.path_crc}"
    if not unreadable:
        yield from _sampling_problems(row)
    if row.experts is not None:
        yield from _experts_problems(row)
    if decoded(row.reply, dict[str, Any]) is None:
        yield "its reply is no JSON object"
    if row.given is not None and decoded(row.given, GivenSpans) is None and row.given != "null":
        yield "its given tokens are no list of spans"
    if row.shape is not None and decoded(row.shape, RequestShape | None) is None and row.shape != "null":
        yield "its shape cannot be read"
    if row.label is not None and row.label not in LABELS:
        yield f"its label {row.label!r} is none of {', '.join(LABELS)}"
    if row.untrainable is not None and row.untrainable not in set(UntrainedReason):
        yield f"its reason {row.untrainable!r} is none of {', '.join(UntrainedReason)}"


def _link_problems(row: Row[Any], seen: _AttemptPaths) -> Iterator[str]:
    if row.follows is not None and row.follows not in seen.paths:
        yield f"it follows completion {row.follows}, which is no earlier one of its attempt"
    if row.prefix_of is None:
        if row.prefix_length:
            yield f"it shares {row.prefix_length} tokens but names no completion"
    elif row.prefix_of not in seen.paths:
        yield f"its prefix is of completion {row.prefix_of}, which is no earlier one of its attempt"
    elif (path := seen.paths[row.prefix_of]) is None:
        yield f"its prefix is of completion {row.prefix_of}, whose path cannot be read"
    elif not 0 <= row.prefix_length <= len(path):
        yield f"it shares {row.prefix_length} tokens with completion {row.prefix_of}, which has {len(path)}"


def _experts_problems(row: Row[Any]) -> Iterator[str]:
    """Check that the experts start in the shared part, or right after it, and end before the last sampled token."""
    try:
        experts = unpack(row.experts)
    except ValueError as error:
        yield f"its experts cannot be read ({error})"
        return
    last = row.prefix_length + (len(row.prompt_tail) + len(row.sampled)) // NUMBER_BYTES - 1
    if experts.start > row.prefix_length or experts.end != last:
        yield (
            f"its experts cover the tokens {experts.start} to {experts.end}; they should start at {row.prefix_length} "
            f"or before and end at {last}"
        )


def _sampling_problems(row: Row[Any]) -> Iterator[str]:
    """Check logprobs and version spans: in order for any completion, complete for a trainable one."""
    sampled, logprobs = len(row.sampled) // NUMBER_BYTES, floats(row.logprobs)
    spans = decoded(row.versions, Spans)
    if spans is None:
        yield "its versions are no list of spans"
        spans = []
    named = [VersionSpan(*span) for span in spans]
    inside = all(0 <= span.start <= span.end <= sampled for span in named)
    if not inside or any(before.end > after.start for before, after in pairwise(named)):
        yield f"its version spans {spans} overlap or leave its {sampled} sampled tokens"
    given = _given(row)
    places = [0, *(place for span in given for place in span), sampled]
    if places != sorted(places) or any(start == end for start, end in given):
        yield f"its given spans {given} overlap or leave its {sampled} tokens"
    if any(start < span.end and span.start < end for start, end in given for span in named):
        yield f"its version spans {spans} name weights for given tokens {given}"
    own = sampled - sum(end - start for start, end in given)
    if given and len(logprobs) > own:
        yield f"it has {len(logprobs)} logprobs for {own} sampled tokens"
    if row.untrainable is not None:
        return
    if len(logprobs) != own:
        yield f"it is trainable with {len(logprobs)} logprobs for {own} sampled tokens"
    if not all(math.isfinite(value) for value in logprobs):
        yield "it is trainable with a logprob that is no number"
    covered = sum(end - start for _, start, end in spans)
    if covered != own:
        yield f"it is trainable with versions for {covered} of {own} sampled tokens"


def _given(row: Row[Any]) -> list[GivenSpan]:
    """The spans of given tokens; none where the column is null or unreadable, which `_problems` reports."""
    return [] if row.given is None else decoded(row.given, GivenSpans) or []


def _is_numbers(data: object) -> bool:
    return isinstance(data, bytes) and len(data) % NUMBER_BYTES == 0
