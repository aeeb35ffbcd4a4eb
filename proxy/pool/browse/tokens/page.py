"""A page of a completion's tokens: text, logprob, version, and what the step that trained it gave each of them."""

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import Connection, select

from proxy.pool.browse.snapshot import snapshot
from proxy.pool.browse.tokens.paths import Sampled, TokenPath, path_of
from proxy.pool.browse.tokens.places import origin_of
from proxy.pool.browse.tokens.record import TokenNote, notes, record_of
from proxy.pool.browse.tokens.texts import RUN_UP, vocabulary
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.schema import attempts, fates, policy_versions, rollouts
from proxy.pool.schema import groups as groups_table

MOST_TOKENS = 2000
"""Tokens of a page."""


@dataclass(frozen=True)
class TokenPage:
    """Tokens [offset, offset + len(ids)) of a completion's path. The lists have one entry for each token."""

    completion: int
    offset: int
    total: int
    prompt_length: int
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    by: list[int | None] = field(default_factory=list)
    """The completion that sampled it; None: it is of a prompt, or given."""
    ordinals: dict[int, int] = field(default_factory=dict)
    """The place in the attempt of each completion of the path, by id."""
    given: list[bool] = field(default_factory=list)
    """The proxy wrote it, to begin a prescribed call."""
    logprobs: list[float | None] = field(default_factory=list)
    versions: list[str | None] = field(default_factory=list)
    advantages: list[float | None] = field(default_factory=list)
    ratios: list[float | None] = field(default_factory=list)
    """The trainer's probability before the step over the one it was sampled with."""
    coefficients: list[float | None] = field(default_factory=list)
    step: int | None = None
    """The step that trained it; None: none did that counts."""
    tokenizer: str | None = None
    """The directory of the tokenizer that gave the texts; None: none was found."""
    notes: list[str] = field(default_factory=list)
    """What is missing, and why."""


def token_page(pool: Pool, completion_id: int, offset: int, model: Path | None = None) -> TokenPage:
    """Return a page of tokens of a completion's path. UserError when the pool does not have it.

    `model`: a directory with the tokenizer. None: it is looked for.
    """
    with snapshot(pool) as connection:
        path = path_of(connection, completion_id)
        run_id = connection.scalar(select(attempts.c.run_id).where(attempts.c.id == path.attempt_id))
        origin = origin_of(connection, run_id, path.proxy_id)
        step, record = _trained_by(connection, path.attempt_id, completion_id)
    words = vocabulary(pool, origin, model)
    start = max(0, min(offset, len(path.tokens)))
    page = TokenPage(completion_id, start, len(path.tokens), path.prompt_length, step=step, tokenizer=words.directory)
    if words.note:
        page.notes.append(words.note)
    if not path.intact:
        page.notes.append("the stored tokens do not match the checksum that was taken when they were served")
    known = _notes(page, path, record)
    end = min(len(path.tokens), start + MOST_TOKENS)
    page.ids.extend(path.tokens[start:end])
    page.texts.extend(words.texts(path.tokens[start:end], path.tokens[max(0, start - RUN_UP) : start]))
    page.ordinals.update({answer.completion: answer.ordinal for answer in path.answers})
    starts = [answer.start for answer in path.answers]
    for place in range(start, end):
        which = bisect_right(starts, place) - 1
        answer = path.answers[which] if which >= 0 and place < starts[which] + path.answers[which].tokens else None
        _add(page, place, answer, known)
    return page


def _add(page: TokenPage, place: int, answer: Sampled | None, known: dict[tuple[int, int], TokenNote]) -> None:
    """Add what is known of the token at a place."""
    at = -1 if answer is None else place - answer.start
    given = answer is not None and any(first <= at < end for first, end in answer.given)
    sampled = answer if answer is not None and not given else None
    note = known.get((sampled.completion, place)) if sampled else None
    logprob = _logprob(sampled, at) if sampled else None
    page.by.append(sampled.completion if sampled else None)
    page.given.append(given)
    page.logprobs.append(logprob)
    spans = sampled.versions if sampled else ()
    page.versions.append(next((name for name, first, end in spans if first <= at < end), None))
    page.advantages.append(_finite(note.advantage) if note else None)
    page.coefficients.append(_finite(note.coefficient) if note else None)
    page.ratios.append(_ratio(note.logp, logprob) if note and logprob is not None else None)


def _logprob(answer: Sampled, at: int) -> float | None:
    """Return the logprob of a token of an answer; given tokens have none, so they are not counted."""
    place = at - sum(min(end, at) - first for first, end in answer.given if first < at)
    return _finite(answer.logprobs[place]) if place < len(answer.logprobs) else None


def _ratio(logp: float, before: float) -> float | None:
    return _finite(math.exp(min(logp - before, 80.0)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _trained_by(connection: Connection, attempt_id: int, completion_id: int) -> tuple[int | None, Path | None]:
    """Return the step that trained a completion, and the file with the step's record of tokens."""
    by_fate = (
        select(policy_versions.c.step, policy_versions.c.checkpoint, policy_versions.c.retired_at)
        .join_from(fates, policy_versions, policy_versions.c.id == fates.c.version_id)
        .where(fates.c.completion_id == completion_id)
    )
    row = connection.execute(by_fate).one_or_none()
    if row is None:
        return None, None
    taken = (
        select(groups_table.c.step)
        .join_from(attempts, rollouts, rollouts.c.id == attempts.c.rollout_id)
        .join(groups_table, groups_table.c.id == rollouts.c.group_id)
        .where(attempts.c.id == attempt_id)
    )
    counts = row.retired_at is None and connection.scalar(taken) == row.step
    return row.step if counts else None, record_of(row.checkpoint, row.step) if counts else None


def _notes(page: TokenPage, path: TokenPath, record: Path | None) -> dict[tuple[int, int], TokenNote]:
    if record is None:
        page.notes.append("no step that counts has trained this call, so there are no ratios and advantages")
        return {}
    try:
        return notes(record, [answer.completion for answer in path.answers])
    except OSError as error:
        why = "is not on this machine" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        page.notes.append(f"the record of the step's tokens, {record}, {why}: ratios and advantages are missing")
    except UserError as error:
        page.notes.append(str(error))
    return {}
