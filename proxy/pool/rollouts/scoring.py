"""Rollouts that can be scored (again), their new rewards, and what judges have said already.

A rollout keeps the outcomes that were replaced, each with the name of what replaced it. A group changes as a whole or
not at all, since the rewards of its members are compared: one that still runs, or that a train step has taken, stays as
it is. Left out: who scores (harness/rewards).
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert, select, update

from proxy.pool.database import Pool, retried
from proxy.pool.rollouts.masked import ZERO, without_turns, zeroed
from proxy.pool.rollouts.runs import lock_run
from proxy.pool.schema import attempts, groups, judgements, rollouts, tasks

UNSCORED = "reward"
"""The failure of a rollout whose scorer came to no reward."""
ASKED_AGAIN = ("verifier", UNSCORED)
"""Failures without a reward that a scorer is asked about; the others say nothing about the agent's work."""


@dataclass(frozen=True, kw_only=True)
class Scorable:
    """A finished rollout. `reward`, `parts`, `failure` and `detail` are what its verifier said."""

    rollout_id: int
    attempt_id: int
    queue_index: int
    member: int
    state: str
    """State of its group."""
    agent: str
    task: Mapping[str, Any]
    reward: float | None
    parts: Mapping[str, float]
    failure: str | None
    detail: str
    timings: Mapping[str, float]
    exit_code: int | None
    current: float | None = None
    """Its reward at present."""


@dataclass(frozen=True, kw_only=True)
class NewScore:
    """What a scorer says about a rollout."""

    reward: float | None
    parts: Mapping[str, float]
    why: str = ""
    """Why it has no reward."""


@dataclass(frozen=True)
class Written:
    """What became of new scores."""

    rollouts: int
    left: int
    """Rollouts whose reward stays as it is: their group still ran when they were scored, a train step has taken it, it
    was lost, or they were zeroed."""


def replaced(by: str, reward: float | None, parts: Mapping[str, float], failure: str | None, detail: str) -> Any:
    """Return the record of an outcome that `by` replaces."""
    return {"by": by, "at": time.time(), "reward": reward, "parts": dict(parts), "failure": failure, "detail": detail}


def of_attempt(pool: Pool, attempt_id: int) -> dict[str, Any]:
    """Return what a scorer gets to know of a closed attempt besides its rollout."""
    columns = (attempts.c.agent, attempts.c.timings, attempts.c.exit_code, rollouts.c.member, groups.c.queue_index)
    query = select(*columns, groups.c.state).join_from(attempts, rollouts, rollouts.c.id == attempts.c.rollout_id)
    with pool.read() as connection:
        row = connection.execute(query.join(groups).where(attempts.c.id == attempt_id)).one()
    return {**row._mapping, "timings": row.timings or {}}


def scorable(pool: Pool, run_id: int) -> list[Scorable]:
    """Return the finished rollouts of a run that have a reward or could have one, in queue order."""
    query = (
        select(rollouts, groups.c.task_id, groups.c.queue_index, groups.c.state, attempts.c.agent)
        .add_columns(attempts.c.timings, attempts.c.exit_code)
        .join_from(rollouts, groups)
        .join(attempts, attempts.c.id == rollouts.c.attempt_id)
        .where(groups.c.run_id == run_id, groups.c.dropped_at.is_(None), rollouts.c.finished_at.is_not(None))
        .where(rollouts.c.reward.is_not(None) | rollouts.c.failure.in_(ASKED_AGAIN))
    )
    with pool.read() as connection:
        rows = connection.execute(query).all()
        # Apart, as a run has few tasks and many rollouts of each.
        specs = {row.id: row.spec for row in connection.execute(select(tasks).where(tasks.c.run_id == run_id))}
    rows = sorted(rows, key=lambda row: (row.queue_index, row.member))
    return [_scorable(row, specs[row.task_id]) for row in rows]


def _scorable(row: Any, task: Mapping[str, Any]) -> Scorable:
    """A rollout with the verifier's outcome: the oldest that was replaced, or the one that it has."""
    first = (row.replaced or [{}])[0]
    own = {"reward": _earned(row), "parts": row.reward_parts or {}, "failure": row.failure, "detail": row.detail or ""}
    outcome = own | {name: value for name, value in first.items() if name in own}
    return Scorable(
        rollout_id=row.id,
        attempt_id=row.attempt_id,
        queue_index=row.queue_index,
        member=row.member,
        state=row.state,
        agent=row.agent,
        task=task,
        timings=row.timings or {},
        exit_code=row.exit_code,
        current=row.reward,
        **outcome,
    )


def _earned(row: Any) -> float | None:
    """The reward of a rollout, before it was taken away for cheating."""
    reward: float | None = row.integrity["reward"] if row.hacked == ZERO else row.reward
    return reward


@retried
def write_scores(pool: Pool, run_id: int, by: str, scores: Mapping[int, NewScore]) -> Written:
    """Give rollouts of finished groups that no train step has taken their new rewards, in one transaction.

    A group that has another rollout with a reward, or that could have one, is left out.
    """
    written = 0
    with pool.write() as connection:
        lock_run(connection, run_id)  # so that no step takes a group meanwhile
        query = select(rollouts).join_from(rollouts, groups).where(groups.c.run_id == run_id, groups.c.state == "DONE")
        rows = connection.execute(query).all()
        partly = {row.group_id for row in rows if row.id not in scores and _could_be_scored(row)}
        for row in rows:
            if (score := scores.get(row.id)) is None or row.group_id in partly:
                continue
            before = replaced(by, _earned(row), row.reward_parts or {}, row.failure, row.detail or "")
            policy = row.failure if row.failure not in ASKED_AGAIN else None
            values = {
                "reward": score.reward,
                "reward_parts": dict(score.parts),
                "failure": UNSCORED if score.reward is None else policy,
                "detail": score.why if score.reward is None else (row.detail if policy else ""),
                "replaced": [*(row.replaced or []), before],
            }
            if row.hacked == ZERO:  # it stays at its zero, or falls below
                values["integrity"] = {**row.integrity, "reward": score.reward}
                values["reward"] = None if score.reward is None else zeroed(row.integrity, score.reward)
                values["reward_parts"] = without_turns(score.parts)
            connection.execute(update(rollouts).where(rollouts.c.id == row.id).values(values))
            written += row.hacked != ZERO
    return Written(written, len(scores) - written)


def _could_be_scored(row: Any) -> bool:
    return row.reward is not None or row.failure in ASKED_AGAIN


def judgement(pool: Pool, key: str) -> tuple[float, str] | None:
    """Return the score that a judge gave before to what this key names, and its reason; None: it was not asked."""
    with pool.read() as connection:
        query = select(judgements.c.score, judgements.c.reason).where(judgements.c.key == key)
        row = connection.execute(query).one_or_none()
        return None if row is None else (row.score, row.reason)


@retried
def keep_judgement(pool: Pool, key: str, model: str, score: float, reason: str) -> None:
    """Store a judge's score. The first one of a key stays."""
    with pool.write() as connection:
        if connection.scalar(select(judgements.c.key).where(judgements.c.key == key)) is None:
            values = {"key": key, "model": model, "score": score, "reason": reason, "created_at": time.time()}
            connection.execute(insert(judgements).values(values))
