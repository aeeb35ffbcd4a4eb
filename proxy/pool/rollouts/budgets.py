"""Limits on the model calls of an attempt, and what the proxy saw of these calls.

A budget is checked when a call begins, against the rows committed by then, so calls in flight at the same time may
exceed it by their own number. Not here: the limit on time, which the sandbox enforces (harness/rollout).
"""

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, Select, bindparam, case, func, select, update

from proxy.pool.completions.records import SERVED_FINISH_REASONS
from proxy.pool.database import Pool, for_update, retried
from proxy.pool.schema import SAMPLED_TOKENS, attempts, completions


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Maximum model calls (`turns`) and sampled tokens of one attempt; None: no limit."""

    turns: int | None = None
    tokens: int | None = None

    def __bool__(self) -> bool:
        return self.turns is not None or self.tokens is not None


UNLIMITED = Budget()
FAILED_CALLS = 1000
"""Failed calls of an attempt whose times are kept, the newest ones."""


@dataclass(frozen=True, kw_only=True)
class CallsSeen:
    """The recorded calls of an attempt, in short."""

    completed: int
    """Number of calls with a complete answer."""
    broken: str | None
    """Why the newest call failed, if the agent was not at fault and no call has succeeded since."""
    spent: str | None
    """The limit that a call was refused for: turns or tokens."""


def spent(pool: Pool, attempt_id: int, budget: Budget) -> str | None:
    """Return the limit that an attempt has reached (turns or tokens), or None."""
    answered = func.count().filter(completions.c.finish_reason.in_(SERVED_FINISH_REASONS))
    query = select(answered, func.coalesce(func.sum(SAMPLED_TOKENS), 0)).where(completions.c.attempt_id == attempt_id)
    with pool.read() as connection:
        turns, tokens = connection.execute(query).one()
    if budget.turns is not None and turns >= budget.turns:
        return "turns"
    return "tokens" if budget.tokens is not None and tokens >= budget.tokens else None


@retried
def note_spent(pool: Pool, attempt_id: int, what: str) -> None:
    """Record that a call was refused because this limit (turns or tokens) is reached."""
    with pool.write() as connection:
        connection.execute(update(attempts).where(attempts.c.id == attempt_id).values(spent=what))


@retried
def note_trouble(pool: Pool, attempt_id: int, trouble: str, started: float | None = None) -> None:
    """Record that a call failed without a fault of its client, and when: a later success outweighs it.

    `started`: when the call came, unix time.
    """
    this, now = attempts.c.id == attempt_id, time.time()
    with pool.write() as connection:
        spans = connection.scalar(for_update(select(attempts.c.failed_calls).where(this))) or []
        spans = [*spans, [now if started is None else started, now]][-FAILED_CALLS:]
        values = {"trouble": trouble, "trouble_at": now, "failed_calls": spans}
        connection.execute(update(attempts).where(this).values(values))


def _calls_seen_query() -> Select[Any]:
    of: BindParameter[int] = bindparam("attempt_id")
    answered = (completions.c.attempt_id == of) & completions.c.finish_reason.in_(SERVED_FINISH_REASONS)
    last = select(func.max(completions.c.finished_at)).where(answered).scalar_subquery()
    completed = select(func.count()).where(answered).scalar_subquery()
    broken = attempts.c.trouble_at >= func.coalesce(last, 0)
    return select(completed, case((broken, attempts.c.trouble)), attempts.c.spent).where(attempts.c.id == of)


CALLS_SEEN = _calls_seen_query()
"""Built once: SQLAlchemy takes longer to build it than the database to answer."""


def calls_seen(pool: Pool, attempt_id: int) -> CallsSeen:
    """Summarise the calls of an attempt. This counts more than the agent's exit code."""
    with pool.read() as connection:
        completed, broken, exhausted = connection.execute(CALLS_SEEN, {"attempt_id": attempt_id}).one()
    return CallsSeen(completed=completed, broken=broken, spent=exhausted)


def is_refused(pool: Pool, attempt_id: int) -> bool:
    """Return whether a call of an attempt was refused for good: a limit is reached, or it has left a recorded one."""
    why = func.coalesce(attempts.c.spent, attempts.c.differed)
    with pool.read() as connection:
        return connection.scalar(select(why).where(attempts.c.id == attempt_id)) is not None


def last_event(pool: Pool, attempt_id: int) -> float | None:
    """Return when the newest call of an attempt ended (unix time); None when it made none."""
    with pool.read() as connection:
        return connection.scalar(
            select(func.max(completions.c.finished_at)).where(completions.c.attempt_id == attempt_id)
        )
