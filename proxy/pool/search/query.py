"""Questions to the index: words in replies and results, and filters of rollouts. Each reads a bounded part."""

import re
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from proxy.pool.errors import UserError

HITS = 30
"""Hits of a page."""
WALK = 4000
"""Candidates that a question looks at. Where fewer pass, the page is short and names the place to go on."""
SECONDS = 2.0
"""Maximum seconds of a question."""
MOST_WORDS = 16
_TERM = re.compile(r'"([^"]*)"|(\S+)')


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is searched: everything that is set must hold. Bounds are inclusive."""

    words: str = ""
    """All of them stand in one call: in its reply, or in the results that its request showed. "..." is a phrase, and
    word* the beginning of a word."""
    run_id: int | None = None
    agent: str | None = None
    domain: str | None = None
    failure: str | None = None
    """A kind of failure; "any": some failure; "none": none."""
    event: str | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    no_reward: bool = False
    """Only rollouts without one."""
    least_tokens: int | None = None
    most_tokens: int | None = None
    least_calls: int | None = None
    most_calls: int | None = None


@dataclass(frozen=True)
class Hit:
    """A call, or a rollout where no words were searched."""

    rollout_id: int | None
    call: int | None
    attempt_id: int | None
    events: int | None
    """How often the wanted event happened in the rollout."""


@dataclass(frozen=True)
class Hits:
    """A page of hits, newest first."""

    hits: list[Hit]
    before: int | None
    """Where the next page begins; None: this was the last."""


def search(index: sqlite3.Connection, wanted: Wanted, before: int | None = None) -> Hits:
    """Answer a question. UserError when it takes too long."""
    with _limited(index):
        if wanted.words.strip():
            return _calls(index, wanted, before)
        return _rollouts(index, wanted, before)


def matching(words: str) -> str:
    """Return the words as FTS5 reads them: every one must stand there. UserError when there are none to search."""
    terms = []
    for phrase, word in _TERM.findall(words.replace("\0", " "))[:MOST_WORDS]:
        text = phrase or word
        beginning = not phrase and text.endswith("*") and len(text) > 1
        text = text.rstrip("*") if beginning else text
        if re.search(r"\w", text):
            quoted = text.replace('"', '""')
            terms.append(f'"{quoted}"{"*" if beginning else ""}')
    if not terms:
        raise UserError(f"{words!r} has no word to search for; name one with letters or digits")
    return " AND ".join(terms)


def _calls(index: sqlite3.Connection, wanted: Wanted, before: int | None) -> Hits:
    given: list[Any] = [matching(wanted.words)]
    older = ""
    if before is not None:
        older, given = " and rowid < ?", [*given, before]
    inner = f"select rowid as id from words where words match ?{older} order by rowid desc limit {WALK}"
    conditions, values = _conditions(wanted)
    query = (
        f"select found.id, calls.attempt_id, calls.rollout_id, events.count from ({inner}) found "
        "join calls on calls.id = found.id left join outcomes on outcomes.rollout_id = calls.rollout_id "
        "left join events on events.kind = ? and events.rollout_id = calls.rollout_id "
        f"where {conditions} order by found.id desc limit {HITS}"
    )
    rows = index.execute(query, (*given, wanted.event or "", *values)).fetchall()
    hits = [Hit(row["rollout_id"], row["id"], row["attempt_id"], row["count"]) for row in rows]
    if len(hits) == HITS:
        return Hits(hits, hits[-1].call)
    seen = index.execute(f"select count(*), min(id) from ({inner})", given).fetchone()
    return Hits(hits, seen[1] if seen[0] == WALK else None)


def _rollouts(index: sqlite3.Connection, wanted: Wanted, before: int | None) -> Hits:
    source, given = _source(wanted, before)
    conditions, values = _conditions(wanted)
    query = (
        f"select outcomes.rollout_id, events.count from ({source}) found "
        "join outcomes on outcomes.rollout_id = found.rollout_id "
        "left join events on events.kind = ? and events.rollout_id = found.rollout_id "
        f"where {conditions} order by found.rollout_id desc limit {HITS}"
    )
    rows = index.execute(query, (*given, wanted.event or "", *values)).fetchall()
    hits = [Hit(row["rollout_id"], None, None, row["count"]) for row in rows]
    if len(hits) == HITS:
        return Hits(hits, hits[-1].rollout_id)
    seen = index.execute(f"select count(*), min(rollout_id) from ({source})", given).fetchone()
    return Hits(hits, seen[1] if seen[0] == WALK else None)


def _source(wanted: Wanted, before: int | None) -> tuple[str, list[Any]]:
    """Select the candidates from the index that leaves the fewest."""
    older = "" if before is None else " and rollout_id < ?"
    end: list[Any] = [] if before is None else [before]
    tail = f"{older} order by rollout_id desc limit {WALK}"
    if wanted.event:
        return f"select rollout_id from events where kind = ?{tail}", [wanted.event, *end]
    if wanted.failure not in (None, "any", "none"):
        return f"select rollout_id from outcomes where failure = ?{tail}", [wanted.failure, *end]
    if wanted.run_id is not None:
        return f"select rollout_id from outcomes where run_id = ?{tail}", [wanted.run_id, *end]
    return f"select rollout_id from outcomes where true{tail}", end


def _conditions(wanted: Wanted) -> tuple[str, list[Any]]:
    """Return what must hold of a rollout as SQL, and its values."""
    rules: list[tuple[str, Any]] = [
        ("calls.run_id = ?" if wanted.words.strip() else "outcomes.run_id = ?", wanted.run_id),
        ("outcomes.agent = ?", wanted.agent),
        ("outcomes.domain = ?", wanted.domain),
        ("outcomes.reward >= ?", wanted.least_reward),
        ("outcomes.reward <= ?", wanted.most_reward),
        ("outcomes.tokens >= ?", wanted.least_tokens),
        ("outcomes.tokens <= ?", wanted.most_tokens),
        ("outcomes.calls >= ?", wanted.least_calls),
        ("outcomes.calls <= ?", wanted.most_calls),
    ]
    known = [(rule, value) for rule, value in rules if value is not None]
    fixed = ["events.count > 0"] if wanted.event else []
    if wanted.failure == "any":
        fixed.append("outcomes.failure is not null")
    elif wanted.failure == "none":
        fixed.append("outcomes.rollout_id is not null and outcomes.failure is null")
    elif wanted.failure is not None:
        known.append(("outcomes.failure = ?", wanted.failure))
    if wanted.no_reward:
        fixed.append("outcomes.rollout_id is not null and outcomes.reward is null")
    return " and ".join(["true", *(rule for rule, _ in known), *fixed]), [value for _, value in known]


@contextmanager
def _limited(index: sqlite3.Connection) -> Iterator[None]:
    until = time.monotonic() + SECONDS
    index.set_progress_handler(lambda: time.monotonic() > until, 20_000)
    try:
        yield
    except sqlite3.OperationalError as error:
        if "interrupted" not in str(error):
            raise
        raise UserError(f"this search takes more than {SECONDS:g} s; name a rarer word, a run, or an event") from error
    finally:
        index.set_progress_handler(None, 0)
