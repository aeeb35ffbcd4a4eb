"""Windowed FIFO: which finished groups the trainer may take.

From MiniMax Forge (M2 report, arXiv 2605.26494 section 6.2.4): groups queue in the order of submission, and only those
in a window of W from the oldest unconsumed one may be taken, so that fast groups cannot run far ahead of slow ones.
Any finished group in the window may be taken; we take the lowest index, which makes a run reproducible.
"""

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sqlalchemy import Connection, Row, func, select, update

from proxy.pool.behaviour.process import SAME, ProcessRule, equal_rewards
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import of_attempts
from proxy.pool.database import Pool, retried
from proxy.pool.errors import UserError
from proxy.pool.processes.owners import demand_trainer
from proxy.pool.rollouts.counts import count, keep_missing
from proxy.pool.rollouts.failures import enough_valid, why_untrained
from proxy.pool.rollouts.masked import MASKED, masked_as_hacked
from proxy.pool.rollouts.runs import current_version, lock_run, version_name, version_of, waiting
from proxy.pool.rollouts.states import move
from proxy.pool.schema import attempts, groups, policy_versions, rollouts, tasks
from proxy.pool.training import unequal
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
    refill: bool = False
    """Skip groups whose rewards are all equal once the window reaches them, and take others in their place."""
    process: ProcessRule | None = None
    """Groups of equal rewards whose process rewards differ by this rule are not skipped. None: there are none."""

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
    weight: float = 1.0
    """Weight of its tokens in the loss, by the user's function (proxy/pool/functions)."""
    failure: str | None = None
    """The kind of its failure (proxy/pool/rollouts/failures.py), also of one with a verdict. None: it did not fail."""
    failed_calls: Sequence[Sequence[float]] = ()
    """Begin and end of its model calls that failed without a fault of the agent's (proxy/pool/rollouts/budgets.py)."""
    hacked: bool | None = None
    """Whether it cheated (harness/integrity). None: nobody looked."""

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
    agent: str | None = None
    """The agent of all its members. None: in a row of an older run."""


@dataclass(frozen=True)
class Lease:
    """The groups of one train step. Another lease of the same step returns the same groups."""

    step: int
    groups: list[LeasedGroup]


_Steps = dict[str, tuple[int, bool]]
"""Name of a version of the run -> its step, and whether a rollback has retired it."""
EQUAL = "EQUAL"
"""Stands for the state of a DONE group in `pick` that is to be skipped because its rewards are equal."""


def pick(queue: Sequence[tuple[int, str]], rule: LeaseRule) -> tuple[list[int], list[int]]:
    """Return the positions to take now, in order, and those to skip. Takes none unless the window yields all.

    `queue` holds (position, state) in queue order. The window starts at the oldest group that is RUNNING, DONE or EQUAL
    and moves on as groups are taken and skipped. Where it yields too few, it still moves behind the finished groups at
    its beginning, which the step is certain to take: else a queue in which nothing runs could wait for ever.
    """
    waiting = [(index, state) for index, state in queue if state in ("RUNNING", "DONE", EQUAL)]
    taken: list[int] = []
    skipped: list[int] = []
    while waiting and len(taken) < rule.groups:
        end = None if rule.window is None else waiting[0][0] + rule.window
        within = (entry for entry in waiting if entry[1] != "RUNNING" and (end is None or entry[0] < end))
        chosen = next(within, None)
        if chosen is None:
            return [], skipped
        (skipped if chosen[1] == EQUAL else taken).append(chosen[0])
        waiting.remove(chosen)
    return taken if len(taken) == rule.groups else [], skipped


@retried
def lease(pool: Pool, run_id: int, step: int, rule: LeaseRule, trainer: str | None = None) -> Lease | None:
    """Lease the groups of a train step (state LEASED). None while the window cannot fill the step.

    Groups that are too stale or have too few valid members become TOMBSTONEs on the way, and with `rule.refill` those
    in the window whose rewards are equal, even when the window cannot fill the step. `trainer`: the token of the
    trainer that owns the run; None: none does. UserError for another one, and for a step that is published already.
    """
    mine = (groups.c.state == "LEASED") & (groups.c.step == step)
    with pool.read() as connection:
        _demand_unpublished(connection, run_id, step, trainer)
        leased = _load(connection, run_id, mine)
        if leased or not _anything_to_do(connection, run_id, rule):
            return Lease(step, leased) if leased else None
        # Assessing may load completions and take long, so it reads before the write transaction, which stays short: the
        # proxies' commits wait for that one.
        scores = _scores(connection, run_id)
        assessed = _assess(connection, run_id, rule)
    with pool.write() as connection:
        lock_run(connection, run_id)
        _demand_unpublished(connection, run_id, step, trainer)
        # Another trainer may have leased the step since the read above.
        if not connection.scalar(select(func.count()).where(groups.c.run_id == run_id, mine)):
            keep_missing(connection, assessed.uncounted)
            unequal.keep(connection, assessed.figures)
            # A group whose rollouts were scored again since that read is left for the next lease.
            now = _scores(connection, run_id)
            whys = {id: why for id, why in assessed.whys.items() if now.get(id) == scores[id]}
            _take(connection, run_id, replace(assessed, whys=whys), rule, step)
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


def _queue(connection: Connection, run_id: int) -> list[Row[int, int, str]]:
    # Sorted here, like what _load reads: for an order by index SQLite would read all groups of the run.
    rows = connection.execute(select(groups.c.id, groups.c.position, groups.c.state).where(waiting(run_id)))
    return sorted(rows, key=lambda row: row.position)


def _anything_to_do(connection: Connection, run_id: int, rule: LeaseRule) -> bool:
    """Whether there may be a batch to take, or groups to skip."""
    equal: set[int] = set()
    if rule.refill:
        one_reward = func.max(rollouts.c.reward) - func.min(rollouts.c.reward) <= SAME  # as equal_rewards
        finished = select(groups.c.id).join_from(groups, rollouts).where(waiting(run_id) & (groups.c.state == "DONE"))
        finished = finished.where(~MASKED)
        equal.update(connection.scalars(finished.group_by(groups.c.id).having(one_reward)))
    if equal and rule.process is not None:
        rewarded = rollouts.c.group_id.in_(equal) & rollouts.c.reward.is_not(None) & ~MASKED
        members = connection.scalars(select(rollouts.c.id).where(rewarded)).all()
        if not unequal.known(connection, members):
            return True
        equal -= unequal.unequal(connection, members, rule.process)[0]
    queue = [(row.position, EQUAL if row.id in equal else row.state) for row in _queue(connection, run_id)]
    return any(pick(queue, rule))


def _scores(connection: Connection, run_id: int) -> dict[int, dict[int, tuple[Any, ...]]]:
    """Return, by finished group and rollout, what `_assess` reads and a new score changes."""
    own = rollouts.c
    columns = (own.group_id, own.id, own.reward, own.failure, own.hacked, own.reward_parts)
    scores: dict[int, dict[int, tuple[Any, ...]]] = {}
    for group_id, id, *score in connection.execute(
        select(*columns).join_from(groups, rollouts).where(waiting(run_id) & (groups.c.state == "DONE"))
    ):
        scores.setdefault(group_id, {})[id] = tuple(score)
    return scores


@dataclass(frozen=True)
class _Assessed:
    """What is known of the finished groups."""

    whys: dict[int, Untrained | None]
    """Group -> why it cannot be trained; None: it can."""
    uncounted: dict[int, int]
    """The attempts without figures, each with its rollout."""
    figures: unequal.Figures
    """Figures for process rewards that no row has yet."""
    retired: Mapping[int, Sequence[int]]
    """Group -> its rollouts that are left out because weights sampled them which a rollback has retired."""


def _assess(connection: Connection, run_id: int, rule: LeaseRule) -> _Assessed:
    """Assess each finished group: whether it can be trained, and if not, why.

    Reads the figures on the rollouts' rows, and completions only of those without, and of groups of equal rewards whose
    process rewards are asked for the first time.
    """
    own = rollouts.c
    columns = (own.id, own.attempt_id, own.reward, own.failure, own.versions, MASKED.label("masked"))
    finished = waiting(run_id) & (groups.c.state == "DONE")
    query = select(*columns, rollouts.c.group_id, groups.c.size).join_from(groups, rollouts).where(finished)
    members = connection.execute(query).all()
    uncounted = {m.attempt_id: m.id for m in members if m.versions is None and m.attempt_id is not None}
    counted = count(connection, uncounted)
    names = {m.id: (counted[m.attempt_id].versions if m.attempt_id in counted else m.versions) or () for m in members}
    now, steps = _now(connection, run_id), _steps(connection, run_id, names.values())
    known = _known(steps, None)
    sizes: dict[int, int] = {}
    lags: dict[int, list[int]] = {}
    valid: dict[int, dict[int, float]] = {}
    retired: dict[int, list[int]] = {}
    for m in members:
        why, lag = _standing(m.reward, m.failure, _oldest_step(names[m.id], known, steps), now)
        why = why or (Untrained(UntrainedReason.HACKED) if m.masked else None)
        rolled_back = why is not None and why.reason == UntrainedReason.ROLLED_BACK
        retired.setdefault(m.group_id, []).extend([m.id] if rolled_back else [])
        sizes[m.group_id] = m.size
        lags.setdefault(m.group_id, []).extend([lag] if why is None else [])
        valid.setdefault(m.group_id, {}).update({m.id: m.reward} if why is None else {})
    whys = {id: _unusable(lags[id], len(retired[id]), size, now, rule) for id, size in sizes.items()}
    equal = [id for id in whys if rule.refill and whys[id] is None and equal_rewards(valid[id].values())]
    different: set[int] = set()
    figures: unequal.Figures = {}
    if equal and rule.process is not None:
        different, figures = unequal.unequal(connection, [id for each in equal for id in valid[each]], rule.process)
    for group_id in set(equal) - different:
        detail = f"all are {min(valid[group_id].values()):g}"
        whys[group_id] = Untrained(UntrainedReason.EQUAL_REWARDS, detail)
    return _Assessed(whys, uncounted, figures, retired)


def _unusable(lags: list[int], rolled_back: int, size: int, now: int, rule: LeaseRule) -> Untrained | None:
    """Why a group cannot be trained; None: it can. `lags`: the staleness of its valid rollouts.

    `rolled_back`: the number of rollouts that were sampled by weights which a rollback has since retired.
    """
    if not enough_valid(len(lags), size) and enough_valid(len(lags) + rolled_back, size):
        return Untrained(UntrainedReason.ROLLED_BACK, f"{rolled_back} of {size} rollouts")
    staleness = max(lags, default=now) if rule.stale == "group" else min(lags, default=0)
    if staleness > rule.max_staleness:
        return Untrained(UntrainedReason.STALE, f"{staleness} steps behind, {rule.max_staleness} allowed")
    if not enough_valid(len(lags), size):
        return Untrained(UntrainedReason.TOO_FEW_VALID, f"{len(lags)} of {size} rollouts are usable")
    return None


def _take(connection: Connection, run_id: int, assessed: _Assessed, rule: LeaseRule, step: int) -> None:
    equal = {id: why for id, why in assessed.whys.items() if why and why.reason == UntrainedReason.EQUAL_REWARDS}
    for group_id, why in assessed.whys.items():
        if why is not None and group_id not in equal:
            _drop(connection, group_id, why)
    rows = _queue(connection, run_id)
    # A group that finished after they were assessed, or was scored again, counts as running until the next lease.
    states = {row.id: EQUAL if row.id in equal else row.state if row.id in assessed.whys else "RUNNING" for row in rows}
    taken, skipped = pick([(row.position, states[row.id]) for row in rows], rule)
    for row in rows:
        if row.position in skipped:
            _drop(connection, row.id, equal[row.id])
    # By id: by position, SQLite would read all groups of the run that are DONE, those held out too.
    chosen = [row.id for row in rows if row.position in taken]
    move(connection, groups.c.id.in_(chosen), "DONE", "LEASED", step=step)
    retired = [id for group_id in chosen for id in assessed.retired[group_id]]
    leave_out(connection, dict.fromkeys(retired, Untrained(UntrainedReason.ROLLED_BACK)))


def leave_out(connection: Connection, whys: Mapping[int, Untrained]) -> None:
    """Note of rollouts of leased groups why they are left out: later leases of their step leave them out, too."""
    for rollout_id, why in whys.items():
        connection.execute(update(rollouts).where(rollouts.c.id == rollout_id).values(left_out=str(why)))


def _drop(connection: Connection, group_id: int, why: Untrained) -> None:
    values = {"reason": why.reason, "detail": why.detail, "finished_at": time.time()}
    move(connection, groups.c.id == group_id, "DONE", "TOMBSTONE", **values)


def _load(connection: Connection, run_id: int, condition: Any, *, now: int | None = None) -> list[LeasedGroup]:
    """Load groups with their rollouts and completions, in queue order.

    `now`: the step that staleness is measured from; None: that of the newest version.
    """
    selected = select(groups, tasks.c.spec).join_from(groups, tasks, tasks.c.id == groups.c.task_id)
    rows = sorted(
        connection.execute(selected.where(groups.c.run_id == run_id, condition)), key=lambda row: row.queue_index
    )
    if not rows:
        return []
    final = attempts.c.id == rollouts.c.attempt_id
    query = select(rollouts, attempts.c.failed_calls).outerjoin_from(rollouts, attempts, final)
    query = query.where(rollouts.c.group_id.in_([row.id for row in rows])).order_by(rollouts.c.member)
    members: dict[int, list[Row[Any]]] = {row.id: [] for row in rows}
    for member in connection.execute(query):
        members[member.group_id].append(member)
    attempt_ids = [m.attempt_id for some in members.values() for m in some if m.attempt_id is not None]
    completions = of_attempts(connection, attempt_ids)
    now = _now(connection, run_id) if now is None else now
    steps = _steps(connection, run_id, map(_versions, completions.values()))
    known_at = {step: _known(steps, step) for step in {row.step for row in rows}}
    loaded = []
    for row in rows:
        known = known_at[row.step]
        whole = []
        for member in members[row.id]:
            leased = _leased(member, completions.get(member.attempt_id, []), known, steps, now)
            whole.append(_without(leased, member.completions_left_out, row.function))
        staleness = max((member.staleness for member in whole if member.untrained is None), default=now)
        loaded.append(LeasedGroup(row.id, row.queue_index, row.spec, staleness, whole, row.size, row.agent))
    return loaded


def _leased(
    row: Row[Any], completions: list[Completion], known: dict[str, int], steps: _Steps, now: int
) -> LeasedRollout:
    why, staleness = _standing(row.reward, row.failure, _oldest_step(_versions(completions), known, steps), now)
    why = why or masked_as_hacked(row.hacked, row.integrity)
    if row.set_aside is not None:
        why = why or Untrained(UntrainedReason.FUNCTION, row.set_aside)
    if row.left_out is not None:
        why = why or Untrained.from_text(row.left_out)
    weight = 1.0 if row.weight is None else row.weight
    return LeasedRollout(
        row.id,
        row.member,
        row.reward,
        why,
        completions,
        staleness,
        parts=row.reward_parts or {},
        weight=weight,
        failure=row.failure,
        failed_calls=row.failed_calls or (),
        hacked=None if row.integrity is None else row.hacked is not None,
    )


def _without(member: LeasedRollout, left_out: Collection[int] | None, function: str | None) -> LeasedRollout:
    """The rollout with those completions untrainable that the user's function leaves out. Its staleness stays."""
    if not left_out:
        return member
    why = Untrained(UntrainedReason.FUNCTION, function or "")
    return replace(
        member,
        completions=[
            replace(item, untrainable=why) if item.id in left_out and item.untrainable is None else item
            for item in member.completions
        ],
    )


def _versions(completions: Iterable[Completion]) -> set[str]:
    """Return the names of the weights that sampled trainable tokens."""
    return {span.version for item in completions if item.untrainable is None for span in item.versions}


def _standing(
    reward: float | None, failure: str | None, oldest: int | UntrainedReason, now: int
) -> tuple[Untrained | None, int]:
    """Return why a rollout is masked (None: it is not), and its staleness.

    A failure with a reward is the policy's own and counts.
    """
    why = None
    if reward is None:
        no_reward = Untrained(UntrainedReason.NO_REWARD)
        why = no_reward if failure is None else why_untrained(failure)
    if isinstance(oldest, UntrainedReason):
        return why or Untrained(oldest), 0
    return why, now - oldest


def _now(connection: Connection, run_id: int) -> int:
    newest = current_version(connection, run_id)
    return newest.step if newest else 0


def _steps(connection: Connection, run_id: int, names: Iterable[Collection[str]]) -> _Steps:
    """Return (step, retired by a rollback), by name, for those of these versions that are the run's."""
    columns = (policy_versions.c.id, policy_versions.c.step, policy_versions.c.retired_at.is_not(None))
    ids = {version_id for some in names for name in some if (version_id := version_of(name)) is not None}
    query = select(*columns).where(policy_versions.c.run_id == run_id, policy_versions.c.id.in_(ids))
    return {version_name(version_id): (step, retired) for version_id, step, retired in connection.execute(query)}


def _known(steps: _Steps, step: int | None) -> dict[str, int]:
    """Return the steps of the versions that count for the groups of a step; None: for groups that no step has.

    A retired version counts only for groups of later steps: they were leased while it was current, and are trained
    again unchanged.
    """
    return {name: at for name, (at, retired) in steps.items() if not retired or at < (step or 0)}


def _oldest_step(names: Collection[str], known: dict[str, int], steps: _Steps) -> int | UntrainedReason:
    """Return the train step of the oldest of these weights, or why it is not known: `steps` holds retired ones, too."""
    if names and known.keys() >= set(names):
        return min(known[name] for name in names)
    return UntrainedReason.ROLLED_BACK if names and steps.keys() >= set(names) else UntrainedReason.NO_VERSION
