"""What is shown of hits: rows of the pool as they are now, and of a call the place where the words stand."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from proxy.pool.browse.snapshot import snapshot
from proxy.pool.completions import observed
from proxy.pool.database import Pool
from proxy.pool.schema import attempts, completions, groups, rollouts, runs, tasks
from proxy.pool.search.build import words_of
from proxy.pool.search.query import Hit

AROUND = 90
"""Characters of a text on each side of a word that was found."""


@dataclass(frozen=True)
class Found:
    """One hit."""

    rollout_id: int | None
    attempt_id: int | None
    call: int | None
    ordinal: int | None
    label: str | None
    before: str
    """The text around the first word that was searched: before it, the word, and behind it."""
    word: str
    after: str
    where: str
    """reply | result: where it stands; "": the text is not there any more, or no words were searched."""
    run: str | None
    group_id: int | None
    task: str | None
    domain: str | None
    member: int | None
    agent: str | None
    step: int | None
    reward: float | None
    failure: str | None
    calls: int | None
    tokens: int | None
    events: int | None
    finished_at: float | None


def found(pool: Pool, hits: Sequence[Hit], words: str) -> list[Found]:
    """Return what is shown of hits; those whose rows have left the pool are left out."""
    with snapshot(pool) as connection:
        calls = _calls(connection, [hit.call for hit in hits if hit.call is not None])
        places = _places(connection, [hit.rollout_id for hit in hits if hit.rollout_id is not None])
    shown = []
    for hit in hits:
        place = places.get(hit.rollout_id or 0)
        call = calls.get(hit.call or 0)
        if place is not None or call is not None:
            shown.append(_found(hit, place, call, words))
    return shown


def _calls(connection: Connection, ids: Sequence[int]) -> dict[int, Row[Any]]:
    columns = (completions.c.id, completions.c.attempt_id, completions.c.ordinal, completions.c.label)
    query: Any = select(*columns, completions.c.reply, completions.c.observed).where(completions.c.id.in_(ids))
    return {row.id: row for row in connection.execute(query)}


def _places(connection: Connection, ids: Sequence[int]) -> dict[int, Row[Any]]:
    query = (
        select(rollouts, groups.c.step, tasks.c.name.label("task"), tasks.c.domain, runs.c.name.label("run"))
        .add_columns(func.coalesce(groups.c.agent, attempts.c.agent).label("agent"))
        .join_from(rollouts, groups, groups.c.id == rollouts.c.group_id)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .join(runs, runs.c.id == groups.c.run_id)
        .outerjoin(attempts, attempts.c.id == rollouts.c.attempt_id)
        .where(rollouts.c.id.in_(ids))
    )
    return {row.id: row for row in connection.execute(query)}


def _found(hit: Hit, place: Row[Any] | None, call: Row[Any] | None, words: str) -> Found:
    before, word, after, where = _around(call, words) if call is not None else ("", "", "", "")
    known: dict[str, Any] = {} if place is None else dict(place._mapping)
    return Found(
        rollout_id=hit.rollout_id,
        attempt_id=hit.attempt_id if call is not None else known.get("attempt_id"),
        call=hit.call,
        ordinal=None if call is None else call.ordinal,
        label=None if call is None else call.label,
        before=before,
        word=word,
        after=after,
        where=where,
        calls=known.get("completions"),
        tokens=known.get("sampled_tokens"),
        events=hit.events,
        **{name: known.get(name) for name in _SAME},
    )


_SAME = ("run", "group_id", "task", "domain", "member", "agent", "step", "reward", "failure", "finished_at")


def _around(call: Row[Any], words: str) -> tuple[str, str, str, str]:
    """Return the text around the first place of one of the words, and where it is."""
    seen = None if call.observed is None else observed.unpack(call.observed)
    results = "\n".join(f"{each.head}\n{each.tail}" for each in seen.results) if seen else ""
    terms = sorted(re.findall(r"\w+", words), key=len, reverse=True)
    for where, text in (("reply", words_of(call.reply)), ("result", results)):
        for term in terms:
            at = re.search(rf"\b{re.escape(term)}", text, re.IGNORECASE) or re.search(
                re.escape(term), text, re.IGNORECASE
            )
            if at:
                start, end = at.span()
                return text[max(0, start - AROUND) : start], text[start:end], text[end : end + AROUND], where
    return words_of(call.reply)[: 2 * AROUND], "", "", ""
