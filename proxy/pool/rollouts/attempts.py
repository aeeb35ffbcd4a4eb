"""Attempts: one run of an agent at one rollout. An API key identifies the attempt and is revoked when it ends.

Only the hash of the key is stored. A session is an attempt outside of any run; an unknown key on loopback opens one.
"""

import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, Select, bindparam, func, select, update

from proxy.pool.completions.store import write_labels
from proxy.pool.database import Pool, insert_if_new, insert_row, lock_row, locked, retried
from proxy.pool.errors import UserError
from proxy.pool.rollouts.budgets import UNLIMITED, Budget
from proxy.pool.rollouts.counts import keep_tokens
from proxy.pool.rollouts.prompt_variations import PromptVariation
from proxy.pool.rollouts.starts import START, Start, start_of
from proxy.pool.schema import attempts, groups, rollouts, runs


class HasOutcome(UserError):
    """The rollout already has its outcome: it was cancelled, or another harness finished it."""


PURPOSE = func.coalesce(groups.c.purpose, runs.c.purpose).label("purpose")
# Built once, as CALLS_SEEN in proxy/pool/rollouts/budgets.py is. `of`: the id of the row that is asked for.
_number = select(func.count()).where(attempts.c.rollout_id == rollouts.c.id).correlate(rollouts)
TO_OPEN = (
    select(groups.c.run_id, rollouts.c.group_id, PURPOSE, rollouts.c.finished_at, *START)
    .add_columns(_number.scalar_subquery().label("number"))
    .join_from(rollouts, groups)
    .join(runs, runs.c.id == groups.c.run_id)
    .where(rollouts.c.id == bindparam("of"))
)
"""What a new attempt takes from its rollout."""
CLOSE = update(attempts).where(attempts.c.id == bindparam("of"), attempts.c.closed_at.is_(None))


@dataclass(frozen=True)
class Attempt:
    """One attempt at a rollout, or a session."""

    id: int
    run_id: int | None
    rollout_id: int | None
    agent: str
    purpose: str
    """The run's (train, eval, collect); eval for a held-out group; session outside of runs."""
    open: bool
    opened_at: float
    """Unix time."""
    group_id: int | None = None
    budget: Budget = UNLIMITED
    start: Start | None = None
    """The recorded attempt that it begins with; None: it begins with nothing."""
    variation: PromptVariation | None = None
    """What its model is shown otherwise than its agent writes it; None: nothing."""

    @property
    def dated_at(self) -> float:
        """Unix time for dates in chat templates."""
        return self.opened_at if self.start is None else self.start.dated_at


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How an attempt ended. The verdict is the rollout's (proxy/pool/rollouts/groups.py: Outcome)."""

    failure: str | None = None
    detail: str = ""
    exit_code: int | None = None
    timings: dict[str, float] = field(default_factory=dict)
    augmentation: list[str] = field(default_factory=list)
    """Variations of the task's environment, each as `kind=value`."""


@retried
def open_attempt(
    pool: Pool, rollout_id: int, agent: str, budget: Budget = UNLIMITED, variation: PromptVariation | None = None
) -> tuple[Attempt, str]:
    """Open an attempt at a rollout; return it with its secret key. HasOutcome when the rollout has its outcome."""
    key = f"bf-{secrets.token_urlsafe(24)}"
    with pool.write() as connection:
        # The lock makes attempts of one rollout count one after another: their numbers are 0, 1, 2 ...
        lock_row(connection, rollouts, rollout_id)
        row = connection.execute(TO_OPEN, {"of": rollout_id}).one()
        if row.finished_at is not None:
            raise HasOutcome(
                f"rollout {rollout_id} has an outcome, so no further attempt can start; open a new group instead"
            )
        identity = {"run_id": row.run_id, "rollout_id": rollout_id, "number": row.number}
        values = _values(key, agent) | identity | {"max_turns": budget.turns, "max_tokens": budget.tokens}
        values["prompt_variation"] = msgspec.to_builtins(variation)
        attempt_id = insert_row(connection, attempts, values)
    opened_at = values["opened_at"]
    of_group = row.group_id, budget, start_of(row), variation
    return Attempt(attempt_id, row.run_id, rollout_id, agent, row.purpose, True, opened_at, *of_group), key


@retried
def open_session(pool: Pool, key: str) -> Attempt:
    """Return the session of a key that no run issued; open it if it is new."""
    with pool.write() as connection:
        row = connection.execute(_by_key(key)).one_or_none()
        if row is None:
            insert_if_new(connection, attempts, _values(key, "session") | {"number": 0})
            row = connection.execute(_by_key(key)).one()
    return _attempt(row)


def by_key(pool: Pool, key: str) -> Attempt | None:
    """Return the attempt of a key, closed or not; None when there is none."""
    with pool.read() as connection:
        row = connection.execute(_by_key(key)).one_or_none()
    return None if row is None else _attempt(row)


def by_id(pool: Pool, attempt_id: int) -> Attempt | None:
    """Return the attempt with this id; None when there is none."""
    with pool.read() as connection:
        row = connection.execute(_with_run().where(attempts.c.id == attempt_id)).one_or_none()
    return None if row is None else _attempt(row)


def closed_among(pool: Pool, ids: Collection[int]) -> set[int]:
    """Return those of these attempts that have ended."""
    closed = select(attempts.c.id).where(attempts.c.id.in_(ids), attempts.c.closed_at.is_not(None))
    with pool.read() as connection:
        return set(connection.scalars(closed))


def still_open(pool: Pool, owner: str, *, run_id: int | None = None, rollout_id: int | None = None) -> list[int]:
    """Return the attempts of a run or a rollout that have not ended; none if another than `owner` owns the run.

    `owner`: the token of a harness (proxy/pool/processes/owners.py).
    """
    of = attempts.c.run_id == run_id if rollout_id is None else attempts.c.rollout_id == rollout_id
    with pool.read() as connection:
        return list(connection.scalars(select(attempts.c.id).where(of, _left_open(owner))))


@retried
def close_attempt(pool: Pool, attempt_id: int, ending: Ending) -> None:
    """End an attempt, revoke its key and label its completions. Closing it again changes nothing."""
    values = {
        "failure": ending.failure,
        "detail": ending.detail,
        "exit_code": ending.exit_code,
        "timings": ending.timings,
        "augmentation": ending.augmentation,
        "closed_at": time.time(),
    }
    with pool.write() as connection:
        if connection.execute(CLOSE, values | {"of": attempt_id}).rowcount:
            write_labels(connection, [attempt_id])
            keep_tokens(connection, [attempt_id])


def close_interrupted(pool: Pool, run_id: int, owner: str) -> int:
    """Close the attempts that a crashed harness left open in this run, if `owner` still owns it; return how many."""
    ending = Ending(failure="interrupted", detail="the harness ended while the attempt ran")
    return len(_close_all(pool, attempts.c.run_id == run_id, owner, ending))


def close_lost(pool: Pool, rollout_id: int, owner: str, ending: Ending) -> list[int]:
    """Close the open attempts of a rollout whose machine is gone, if `owner` still owns its run; return their ids."""
    return _close_all(pool, attempts.c.rollout_id == rollout_id, owner, ending)


@retried
def _close_all(pool: Pool, which: ColumnElement[bool], owner: str, ending: Ending) -> list[int]:
    values = {"failure": ending.failure, "detail": ending.detail, "closed_at": time.time()}
    with pool.write() as connection:
        left = which & _left_open(owner)
        # Locked in the order of ids, as every transaction locks attempts, so that two of them cannot deadlock.
        ids = [row.id for row in locked(connection, select(attempts.c.id).where(left).order_by(attempts.c.id))]
        connection.execute(update(attempts).where(attempts.c.id.in_(ids)).values(values))
        write_labels(connection, ids)
        keep_tokens(connection, ids)
        return ids


def _left_open(owner: str) -> ColumnElement[bool]:
    """Select the open attempts of runs that the harness with this token owns. Other harnesses work at the others."""
    owned = select(runs.c.id).where(runs.c.owner["token"].as_string() == owner)
    return attempts.c.closed_at.is_(None) & attempts.c.run_id.in_(owned)


def _values(key: str, agent: str) -> dict[str, Any]:
    return {"key_hash": _hash(key), "agent": agent, "opened_at": time.time()}


def _by_key(key: str) -> Select[Any]:
    return _with_run().where(attempts.c.key_hash == _hash(key))


def _with_run() -> Select[Any]:
    return (
        select(attempts, PURPOSE, rollouts.c.group_id, *START)
        .outerjoin(runs, runs.c.id == attempts.c.run_id)
        .outerjoin(rollouts, rollouts.c.id == attempts.c.rollout_id)
        .outerjoin(groups, groups.c.id == rollouts.c.group_id)
    )


def _hash(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def _attempt(row: Row[Any]) -> Attempt:
    purpose, is_open = row.purpose or "session", row.closed_at is None
    budget = Budget(turns=row.max_turns, tokens=row.max_tokens)
    variation = None if row.prompt_variation is None else msgspec.convert(row.prompt_variation, PromptVariation)
    of_group = row.group_id, budget, start_of(row), variation
    return Attempt(row.id, row.run_id, row.rollout_id, row.agent, purpose, is_open, row.opened_at, *of_group)
