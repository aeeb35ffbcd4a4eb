"""Windowed FIFO: which finished groups the trainer may take.

From MiniMax Forge (M2 report, arXiv 2605.26494 section 6.2.4): groups queue in the order of submission, and only those
in a window of W from the oldest unconsumed one may be taken, so that fast groups cannot run far ahead of slow ones.
Any finished group in the window may be taken; we take the lowest index, which makes a run reproducible.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sqlalchemy import Connection, Row, func, select

from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import of_attempts
from proxy.pool.database import Pool, retried
from proxy.pool.errors import UserError
from proxy.pool.processes.owners import demand_trainer
from proxy.pool.rollouts.failures import enough_valid
from proxy.pool.rollouts.runs import current_version, lock_run, version_name, waiting
from proxy.pool.rollouts.states import move
from proxy.pool.schema import groups, policy_versions, rollouts, tasks
from proxy.pool.training.steps import START_AGAIN
from proxy.pool.untrained import Untrained, UntrainedReason


@dataclass(frozen=True, kw_only=True)
class LeaseRule:
    """What a train step leases: `groups` groups from a window of `window`, at most `max_staleness` steps behind."""

    groups: int
    window: int | None
    """None: no window. Groups are taken as they finish, and the oldest may wait without a bound."""
    max_staleness: int
    stale: Literal["member", "group"] = "group"
    """group: one stale rollout makes its group stale. member: a group is stale when all of its rollouts are; otherwise
    the trainer masks the stale ones, whose rewards still count for the baseline."""

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise UserError(f"a train step takes at least one group, not groups = {self.groups}")
        if self.window is not None and self.window < 1:
            raise UserError(f"a window holds at least one group, not window = {self.window}")
        if self.max_staleness < 0:
            raise UserError(f"max_staleness = {self.max_staleness} is negative; 0 means strictly on policy")


@dataclass(frozen=True)
class LeasedRollout:
    """A rollout of a leased group with the completions of its final attempt."""

    rollout_id: int
    member: int
    reward: float | None
    untrained: Untrained | None
    """Why the rollout is neither trained nor part of its group's statistics; None: it is both."""
    completions: list[Completion]
    staleness: int = 0
    """Published steps since its oldest sampled token."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts of the reward, as the verifier gave them."""

    @property
    def verdict(self) -> float | None:
        """The reward, if the rollout is part of its group's statistics, else None."""
        return self.reward if self.untrained is None else None


@dataclass(frozen=True)
class LeasedGroup:
    """A group leased to the trainer. `staleness`: published steps since its oldest sampled token."""

    group_id: int
    queue_index: int
    task: dict[str, Any]
    staleness: int
    rollouts: list[LeasedRollout]
    size: int | None = None
    """Number of members that count; None: all."""


@dataclass(frozen=True)
class Lease:
    """The groups of one train step. Another lease of the same step returns the same groups."""

    step: int
    groups: list[LeasedGroup]


def pick(queue: Sequence[tuple[int, str]], rule: LeaseRule) -> list[int]:
    """Return the positions to take now, in order; none unless the window yields all of `rule.groups`.

    `queue` holds (position, state) in queue order. The window starts at the oldest group that is RUNNING or DONE and
    moves on as groups are taken.
    """
    waiting = [(index, state) for index, state in queue if state in ("RUNNING", "DONE")]
    taken: list[int] = []
    while waiting and len(taken) < rule.groups:
        end = None if rule.window is None else waiting[0][0] + rule.window
        within = (index for index, state in waiting if state == "DONE" and (end is None or index < end))
        chosen = next(within, None)
        if chosen is None:
            return []
        taken.append(chosen)
        waiting = [entry for entry in waiting if entry[0] != chosen]
    return taken if len(taken) == rule.groups else []


@retried
def lease(pool: Pool, run_id: int, step: int, rule: LeaseRule, trainer: str | None = None) -> Lease | None:
    """Lease the groups of a train step (state LEASED). None while the window cannot fill the step.

    Groups that are too stale or have too few valid members become TOMBSTONEs on the way. `trainer`: the token of the
    trainer that owns the run; None: none does. UserError for another one, and for a step that is published already.
    """
    mine = (groups.c.state == "LEASED") & (groups.c.step == step)
    with pool.read() as connection:
        _demand_unpublished(connection, run_id, step, trainer)
        leased = _load(connection, run_id, mine)
        if leased or not pick([(row.position, row.state) for row in _queue(connection, run_id)], rule):
            return Lease(step, leased) if leased else None
        # Judging loads completions and takes long, so it reads before the write transaction, which stays short:
        # the proxies' commits wait for that one.
        judged = _judge(connection, run_id, rule)
    with pool.write() as connection:
        lock_run(connection, run_id)
        _demand_unpublished(connection, run_id, step, trainer)
        # Another trainer may have leased the step since the read above.
        if not connection.scalar(select(func.count()).where(groups.c.run_id == run_id, mine)):
            _take(connection, run_id, judged, rule, step)
    with pool.read() as connection:
        leased = _load(connection, run_id, mine)
    return Lease(step, leased) if leased else None


def of_step(pool: Pool, run_id: int, step: int) -> list[LeasedGroup]:
    """Return the groups that a train step took, with the staleness that it saw. UserError when they left the pool."""
    with pool.read() as connection:
        dropped = (groups.c.run_id == run_id) & (groups.c.step == step) & groups.c.dropped_at.is_not(None)
        if connection.scalar(select(groups.c.id).where(dropped).limit(1)) is not None:
            raise UserError(
                f"the rollouts of step {step} have left the pool for an archive; read them with proxy.pool.read"
            )
        return _load(connection, run_id, groups.c.step == step, now=step - 1)


def _demand_unpublished(connection: Connection, run_id: int, step: int, trainer: str | None) -> None:
    demand_trainer(connection, run_id, trainer)
    newest = current_version(connection, run_id)
    if newest is not None and newest.step >= step:
        raise UserError(f"step {step} of the run is published already, the newest is {newest.step}; {START_AGAIN}")


def _queue(connection: Connection, run_id: int) -> Sequence[Row[int, int, str]]:
    query = select(groups.c.id, groups.c.position, groups.c.state).where(waiting(run_id)).order_by(groups.c.position)
    return connection.execute(query).all()


def _judge(connection: Connection, run_id: int, rule: LeaseRule) -> dict[int, Untrained | None]:
    """Return, by id, why each finished group cannot be trained; None: it can."""
    finished = groups.c.purpose.is_(None) & (groups.c.state == "DONE")
    return {group.group_id: _unusable(group, rule) for group in _load(connection, run_id, finished, experts=False)}


def _unusable(group: LeasedGroup, rule: LeaseRule) -> Untrained | None:
    valid = [member for member in group.rollouts if member.verdict is not None]
    size = group.size or len(group.rollouts)
    freshest = min((member.staleness for member in valid), default=0)
    staleness = group.staleness if rule.stale == "group" else freshest
    if staleness > rule.max_staleness:
        return Untrained(UntrainedReason.STALE, f"{staleness} steps behind, {rule.max_staleness} allowed")
    if not enough_valid(len(valid), size):
        return Untrained(UntrainedReason.TOO_FEW_VALID, f"{len(valid)} of {size} rollouts are usable")
    return None


def _take(connection: Connection, run_id: int, judged: dict[int, Untrained | None], rule: LeaseRule, step: int) -> None:
    for group_id, why in judged.items():
        if why is not None:
            values = {"reason": why.reason, "detail": why.detail, "finished_at": time.time()}
            move(connection, groups.c.id == group_id, "DONE", "TOMBSTONE", **values)
    # A group that finished after the judging counts as running until the next lease.
    queue = [(row.position, row.state if row.id in judged else "RUNNING") for row in _queue(connection, run_id)]
    chosen = (groups.c.run_id == run_id) & groups.c.position.in_(pick(queue, rule))
    move(connection, chosen, "DONE", "LEASED", step=step)


def _load(
    connection: Connection, run_id: int, condition: Any, *, now: int | None = None, experts: bool = True
) -> list[LeasedGroup]:
    """Load groups with their rollouts and completions, in queue order.

    `now`: the step that staleness is measured from; None: that of the newest version.
    """
    selected = select(groups, tasks.c.spec).join_from(groups, tasks, tasks.c.id == groups.c.task_id)
    rows = connection.execute(selected.where(groups.c.run_id == run_id, condition).order_by(groups.c.queue_index)).all()
    query = select(rollouts).where(rollouts.c.group_id.in_([row.id for row in rows])).order_by(rollouts.c.member)
    members = connection.execute(query).all()
    ids = [row.attempt_id for row in members if row.attempt_id is not None]
    completions = of_attempts(connection, ids, experts)
    steps = _steps(connection, run_id)
    if now is None:
        newest = current_version(connection, run_id)
        now = newest.step if newest else 0
    loaded = []
    for row in rows:
        whole = [
            LeasedRollout(
                m.id,
                m.member,
                m.reward,
                _why_masked(m.failure, m.reward),
                completions.get(m.attempt_id, []),
                parts=m.reward_parts or {},
            )
            for m in members
            if m.group_id == row.id
        ]
        known = {name: step for name, (step, retired) in steps.items() if not retired or step < (row.step or 0)}
        aged = [_aged(member, _oldest_step(member, known), now) for member in whole]
        staleness = max((member.staleness for member in aged if member.untrained is None), default=now)
        loaded.append(LeasedGroup(row.id, row.queue_index, row.spec, staleness, aged, row.size))
    return loaded


def _why_masked(failure: str | None, reward: float | None) -> Untrained | None:
    """Return why a rollout is masked. A failure with a reward is the policy's own and counts."""
    if reward is not None:
        return None
    no_reward = Untrained(UntrainedReason.NO_REWARD)
    return no_reward if failure is None else Untrained(UntrainedReason.ROLLOUT_FAILED, failure)


def _aged(member: LeasedRollout, oldest: int | None, now: int) -> LeasedRollout:
    if oldest is not None:
        return replace(member, staleness=now - oldest)
    valid = member.untrained is None
    return replace(member, untrained=Untrained(UntrainedReason.NO_VERSION)) if valid else member


def _steps(connection: Connection, run_id: int) -> dict[str, tuple[int, bool]]:
    """Return (step, retired by a rollback) for each version of the run, by name.

    A retired version counts only for groups of later steps: they were leased while it was current, and are trained
    again unchanged.
    """
    columns = (policy_versions.c.id, policy_versions.c.step, policy_versions.c.retired_at.is_not(None))
    query = select(*columns).where(policy_versions.c.run_id == run_id)
    return {version_name(version_id): (step, retired) for version_id, step, retired in connection.execute(query)}


def _oldest_step(member: LeasedRollout, steps: dict[str, int]) -> int | None:
    """Return the train step of the oldest weights that sampled a trainable token; None: a version is unknown."""
    names = {span.version for item in member.completions if item.untrainable is None for span in item.versions}
    if not names or not names <= steps.keys():
        return None
    return min(steps[name] for name in names)
