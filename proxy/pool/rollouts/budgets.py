"""What an attempt may use of the model, and what the proxy saw of its calls.

A budget is looked at when a call begins, by the rows that are committed then: calls at work beside each other may go
beyond it by their own number. Left out: the budget of time, which the sandbox holds (harness/rollout.py).
"""

import time
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BindParameter, Select, bindparam, case, func, select, update

from proxy.pool.database import Pool, retried
from proxy.pool.schema import TOKENS, attempts, completions

BROKEN = ("error", "abort")
"""Finish reasons of calls that came to no answer."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Model calls and sampled tokens of one attempt; None: no limit."""

    turns: int | None = None
    tokens: int | None = None

    def __bool__(self) -> bool:
        return self.turns is not None or self.tokens is not None


UNLIMITED = Budget()


@dataclass(frozen=True, kw_only=True)
class CallsSeen:
    """An attempt's calls, as far as they were recorded."""

    completed: int
    """Calls with a whole answer."""
    broken: str | None
    """Why the newest call came to no answer, if it was no fault of the agent's."""
    spent: str | None
    """turns or tokens: a call was refused because these are used up."""


def spent(pool: Pool, attempt_id: int, budget: Budget) -> str | None:
    """Which part of its budget an attempt has used up: turns, tokens, or none."""
    answered = func.count().filter(completions.c.finish_reason.not_in(BROKEN))
    query = select(answered, func.coalesce(func.sum(TOKENS), 0)).where(completions.c.attempt_id == attempt_id)
    with pool.read() as connection:
        turns, tokens = connection.execute(query).one()
    if budget.turns is not None and turns >= budget.turns:
        return "turns"
    return "tokens" if budget.tokens is not None and tokens >= budget.tokens else None


@retried
def note_spent(pool: Pool, attempt_id: int, what: str) -> None:
    """A call was refused for an attempt's budget."""
    with pool.write() as connection:
        connection.execute(update(attempts).where(attempts.c.id == attempt_id).values(spent=what))


@retried
def note_trouble(pool: Pool, attempt_id: int, trouble: str) -> None:
    """A call failed, and its client did nothing wrong. Whether another one went well later shows by its time."""
    with pool.write() as connection:
        values = {"trouble": trouble, "trouble_at": time.time()}
        connection.execute(update(attempts).where(attempts.c.id == attempt_id).values(values))


def _seen() -> Select[Any]:
    of: BindParameter[int] = bindparam("attempt_id")
    answered = (completions.c.attempt_id == of) & completions.c.finish_reason.not_in(BROKEN)
    last = select(func.max(completions.c.finished_at)).where(answered).scalar_subquery()
    completed = select(func.count()).where(answered).scalar_subquery()
    broken = attempts.c.trouble_at >= func.coalesce(last, 0)
    return select(completed, case((broken, attempts.c.trouble)), attempts.c.spent).where(attempts.c.id == of)


CALLS_SEEN = _seen()
"""Made once: SQLAlchemy takes longer to make it than the database to answer."""


def calls_seen(pool: Pool, attempt_id: int) -> CallsSeen:
    """What the proxy saw of an attempt, whatever the agent's exit code says."""
    with pool.read() as connection:
        found = connection.execute(CALLS_SEEN, {"attempt_id": attempt_id}).one()
    return CallsSeen(completed=found[0], broken=found[1], spent=found[2])


def last_event(pool: Pool, attempt_id: int) -> float | None:
    """When the newest call of an attempt ended, unix time."""
    with pool.read() as connection:
        return connection.scalar(
            select(func.max(completions.c.finished_at)).where(completions.c.attempt_id == attempt_id)
        )
