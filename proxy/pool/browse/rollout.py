"""A rollout: its verdict, its attempts, its place in group and queue, and what becomes of its tokens."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, func, select

from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.errors import NotInPool
from proxy.pool.inspect.account import place_of
from proxy.pool.processes.owners import attended
from proxy.pool.rollouts.failures import FAILURES
from proxy.pool.schema import attempts, groups, rollouts, runs, tasks

MOST_ATTEMPTS = 16
"""Attempts of a rollout that are shown, the newest ones."""
MOST_TEXT = 20_000
"""Characters of an instruction."""


@dataclass(frozen=True)
class AttemptEntry:
    """An attempt at a rollout."""

    id: int
    number: int
    failure: str | None
    opened_at: float
    closed_at: float | None
    sampled_tokens: int | None
    final: bool
    """It gave the rollout its outcome."""
    place: str | None
    """Where its tokens are in the account of the run."""


@dataclass(frozen=True)
class RolloutPage:
    """One rollout."""

    id: int
    run: str
    group_id: int
    queue_index: int
    group_state: str
    cut_off: bool
    """Its group is RUNNING, but none of its rollouts runs, as no harness works at its run."""
    group_reason: str | None
    group_detail: str | None
    step: int | None
    held_out: bool
    member: int
    members: list[int]
    """The rollouts of its group, in order."""
    task: str
    domain: str
    instruction: str
    instruction_size: int
    agent: str | None
    reward: float | None
    reward_parts: dict[str, Any]
    group_rewards: list[float | None]
    failure: str | None
    meaning: str
    """What the kind of failure means."""
    detail: str | None
    left_out: str | None
    """Why its lease leaves it out."""
    set_aside: str | None
    weight: float | None
    hacked: str | None
    integrity: Any
    """What detectors and a judge found; None: nobody looked."""
    replaced: Any
    """Its outcomes before a scorer replaced them."""
    versions: list[str]
    completions: int | None
    sampled_tokens: int | None
    trainable_tokens: int | None
    finished_at: float | None
    attempts: list[AttemptEntry]
    attempts_in_all: int
    shown: int | None
    """The attempt to look at first: the one that gave the outcome, else the newest."""


_SAME = (
    "id", "group_id", "queue_index", "step", "member", "task", "domain", "reward", "failure", "detail", "left_out",
    "set_aside", "weight", "hacked", "integrity", "replaced", "completions", "sampled_tokens", "trainable_tokens",
    "finished_at", "run",
)  # fmt: skip


def rollout_view(pool: Pool, rollout_id: int) -> RolloutPage:
    """Return a rollout. NotInPool when there is none with this id."""
    query = (
        select(rollouts, groups.c.queue_index, groups.c.state, groups.c.reason, groups.c.detail.label("group_detail"))
        .add_columns(groups.c.run_id, groups.c.step, groups.c.purpose, groups.c.agent.label("group_agent"))
        .add_columns(tasks.c.name.label("task"), tasks.c.domain, tasks.c.spec, runs.c.name.label("run"))
        .join_from(rollouts, groups, groups.c.id == rollouts.c.group_id)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .join(runs, runs.c.id == groups.c.run_id)
        .where(rollouts.c.id == rollout_id)
    )
    with snapshot(pool) as connection:
        row = connection.execute(query).one_or_none()
        if row is None:
            raise NotInPool(f"the pool has no rollout {rollout_id}; the pages of its groups list those that it has")
        members = connection.execute(
            select(rollouts.c.id, rollouts.c.reward)
            .where(rollouts.c.group_id == row.group_id)
            .order_by(rollouts.c.member)
        ).all()
        tries, total = _tries(connection, row)
        cut_off = row.state == "RUNNING" and not attended(connection, pool, row.run_id)
        agent = connection.scalar(select(attempts.c.agent).where(attempts.c.id == tries[0].id)) if tries else None
    instruction = str((row.spec or {}).get("instruction", ""))
    newest = tries[0].id if tries else None
    return RolloutPage(
        **{name: row._mapping[name] for name in _SAME},
        group_state=row.state,
        cut_off=cut_off,
        group_reason=row.reason,
        group_detail=row.group_detail,
        held_out=row.purpose == "eval",
        members=[each.id for each in members],
        instruction=instruction[:MOST_TEXT],
        instruction_size=len(instruction),
        agent=row.group_agent or agent,
        reward_parts=row.reward_parts or {},
        group_rewards=[each.reward for each in members],
        meaning=FAILURES[row.failure].text if row.failure in FAILURES else "",
        versions=row.versions or [],
        attempts=tries,
        attempts_in_all=total,
        shown=row.attempt_id if row.attempt_id is not None else newest,
    )


def _tries(connection: Connection, row: Row[Any]) -> tuple[list[AttemptEntry], int]:
    """Return the newest attempts of a rollout, and the number of all."""
    mine = attempts.c.rollout_id == row.id
    newest = select(attempts).where(mine).order_by(attempts.c.id.desc()).limit(MOST_ATTEMPTS)
    entries = [
        AttemptEntry(
            id=each.id,
            number=each.number,
            failure=each.failure,
            opened_at=each.opened_at,
            closed_at=each.closed_at,
            sampled_tokens=each.sampled_tokens,
            final=each.id == row.attempt_id,
            place=place_of(connection, each.id),
        )
        for each in connection.execute(newest)
    ]
    return entries, int(connection.scalar(select(func.count()).select_from(attempts).where(mine)) or 0)
