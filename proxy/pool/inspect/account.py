"""The account of a run: where every sampled token is.

Each token is trained by one step that counts, or left out for one reason, or still on its way to a step. Steps keep
what they did with the tokens of their groups (proxy/pool/training/fates.py), attempts how many tokens they sampled, so
no completion is read but those of open attempts. Not here: imitation (`trainer sft`), which the pool does not record.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, case, func, literal, null, select

from proxy.pool.database import Pool
from proxy.pool.rollouts.counts import OWN_TOKENS
from proxy.pool.schema import attempts, completions, fates, groups, policy_versions, rollouts, runs, train_steps
from proxy.pool.training.fates import StepSums, Tally
from proxy.pool.untrained import UntrainedReason, heading

CALLED_OFF = {kind: f"{UntrainedReason.ROLLOUT_FAILED}: {kind}" for kind in ("redundant", "filtered")}
"""Failures of members that were cancelled. They may be ended after a step has taken their group, so their attempts tell
what they sampled, and not the step."""
CONSUMED, TRAINED = "consumed", "trained"
WAITING = ("sampling", "queued", "leased", "rolled_back")
"""Places of tokens on the way: of rollouts without an outcome, of groups that no step has, of groups of a step that is
not published, and of those whose step a rollback has retired and that are not trained again yet."""
DECILES = 10


@dataclass(frozen=True)
class Account:
    """Where the sampled tokens of a run are at one moment."""

    sampled: int
    trained: Tally
    left_out: dict[str, Tally]
    """By reason (proxy/pool/untrained.py)."""
    waiting: dict[str, Tally]
    """By place (WAITING)."""

    @property
    def unaccounted(self) -> int:
        """Sampled tokens that are in none of these places: 0, or rows are missing."""
        placed = (self.trained, *self.left_out.values(), *self.waiting.values())
        return self.sampled - sum(tally.tokens for tally in placed)


def account(pool: Pool, run_id: int) -> Account:
    """Return the account of a run."""
    inner = _placed(run_id).subquery()
    counts = [func.count(inner.c[name].distinct()) for name in ("group_id", "rollout_id")]
    query = select(inner.c.place, *counts, func.sum(inner.c.tokens)).group_by(inner.c.place).order_by(inner.c.place)
    with pool.read() as connection:
        places = {place: Tally(*map(int, values)) for place, *values in connection.execute(query)}
        trained = Tally()
        left_out: dict[str, Tally] = defaultdict(Tally)
        for sums in _steps(connection, run_id):
            trained += sums.trained
            for reason, tally in sums.left_out.items():
                left_out[reason] += tally
    for reason in (UntrainedReason.GIVEN, *CALLED_OFF.values()):  # not sampled; counted by the attempts
        left_out.pop(reason, None)
    sampled = sum(tally.tokens for tally in places.values())
    waiting = {place: places.pop(place) for place in WAITING if place in places}
    places.pop(CONSUMED, None)
    for reason, tally in places.items():
        left_out[reason] += tally
    return Account(sampled, trained, dict(sorted(left_out.items())), waiting)


def _placed(run_id: int) -> Select[Any]:
    """Select every attempt of a run with its place; rollouts without one have a row, too."""
    other = attempts.alias()
    newest = select(func.max(other.c.id)).where(other.c.rollout_id == rollouts.c.id).scalar_subquery()
    detail = case((groups.c.reason == UntrainedReason.GROUP_FILTERED, groups.c.detail), else_=null())
    set_aside = func.coalesce(groups.c.reason + literal(": ") + detail, groups.c.reason, "reason_not_stored")
    fate = select(fates.c.completion_id).join_from(fates, completions).where(completions.c.attempt_id == attempts.c.id)
    without_attempt = rollouts.c.finished_at.is_not(None) & rollouts.c.attempt_id.is_(None) & attempts.c.id.is_not(None)
    place = case(
        (func.coalesce(groups.c.purpose, runs.c.purpose) == "eval", UntrainedReason.HELD_OUT.value),
        (rollouts.c.failure.in_(CALLED_OFF), _failed(rollouts.c.failure)),
        (attempts.c.id != func.coalesce(rollouts.c.attempt_id, newest), UntrainedReason.RETRIED.value),
        (groups.c.state == "TOMBSTONE", set_aside),
        (without_attempt, func.coalesce(_failed(rollouts.c.failure), UntrainedReason.NO_REWARD.value)),
        (rollouts.c.finished_at.is_(None), "sampling"),
        (groups.c.state.in_(("RUNNING", "DONE")), "queued"),
        ((groups.c.state == "LEASED") & fate.exists(), "rolled_back"),
        (groups.c.state == "LEASED", "leased"),
        else_=CONSUMED,
    )
    columns = (groups.c.id.label("group_id"), rollouts.c.id.label("rollout_id"), rollouts.c.finished_at)
    return (
        select(place.label("place"), *columns, func.coalesce(attempts.c.sampled_tokens, OWN_TOKENS).label("tokens"))
        .join_from(groups, runs)
        .join(rollouts, rollouts.c.group_id == groups.c.id)
        .outerjoin(attempts, attempts.c.rollout_id == rollouts.c.id)
        .where(groups.c.run_id == run_id)
    )


def place_of(connection: Connection, attempt_id: int) -> str | None:
    """Return the place of an attempt's tokens; CONSUMED: its step tells that of each. None: it is of no run."""
    run_id = connection.scalar(select(attempts.c.run_id).where(attempts.c.id == attempt_id))
    return None if run_id is None else connection.scalar(_placed(run_id).where(attempts.c.id == attempt_id))


def _failed(kind: ColumnElement[Any]) -> ColumnElement[Any]:
    return literal(f"{UntrainedReason.ROLLOUT_FAILED}: ") + kind


def _steps(connection: Connection, run_id: int) -> Iterator[StepSums]:
    """Yield the sums of the steps that count. Those of before the sums have them in their metrics, without rollouts."""
    count = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None)
    summed = train_steps.c.fates.is_not(null())
    for row in connection.scalars(
        select(train_steps.c.fates).join_from(train_steps, policy_versions).where(count, summed)
    ):
        yield StepSums.from_json(row)
    older = select(train_steps.c.metrics).join_from(train_steps, policy_versions).where(count, ~summed)
    for metrics in connection.scalars(older):
        masked = metrics.get("masked_tokens", {})
        left_out: dict[str, Tally] = defaultdict(Tally)
        for text, tokens in (*metrics.get("excluded_tokens", {}).items(), *masked.items()):
            left_out[heading(text)] += Tally(tokens=tokens)
        yield StepSums(Tally(tokens=metrics.get("trained_tokens", 0) - sum(masked.values())), left_out)


def shares_by_length(pool: Pool, run_id: int) -> dict[str, list[float]]:
    """Return, for each reason and for what is trained, its share of the tokens by the decile of their rollout's length.

    The shortest rollouts come first. Reads the fates of the completions that the pool still has; rollouts that wait, or
    that have left it, are not counted. Empty below ten rollouts.
    """
    inner = _placed(run_id).subquery()
    grouped = (inner.c.rollout_id, inner.c.place)
    query = select(*grouped, func.sum(inner.c.tokens)).where(inner.c.finished_at.is_not(None)).group_by(*grouped)
    taken = (
        select(rollouts.c.id, fates.c.trained, fates.c.left_out)
        .join_from(groups, rollouts)
        .join(completions, completions.c.attempt_id == rollouts.c.attempt_id)
        .join(fates, fates.c.completion_id == completions.c.id)
        .where(groups.c.run_id == run_id, groups.c.state == "CONSUMED")
    )
    parts: dict[int, Counter[str]] = defaultdict(Counter)
    with pool.read() as connection:
        for rollout_id, place, tokens in connection.execute(query):
            parts[rollout_id][place] += int(tokens)
        for rollout_id, trained, left_out in connection.execute(taken):
            if CONSUMED in parts[rollout_id]:
                for text, tokens in ((TRAINED, trained), *left_out.items()):
                    name = heading(text)
                    counted = tokens if name != UntrainedReason.GIVEN else 0
                    parts[rollout_id][name] += counted
                    parts[rollout_id][CONSUMED] -= counted
    return by_decile([part for part in parts.values() if not any(part[place] for place in (CONSUMED, *WAITING))])


def by_decile(parts: list[Counter[str]]) -> dict[str, list[float]]:
    """Return the shares of rollouts' tokens by the decile of their length. `parts`: name -> tokens, of each rollout."""
    if len(parts) < DECILES:
        return {}
    ordered = sorted(parts, key=Counter.total)
    edges = [len(ordered) * n // DECILES for n in range(DECILES + 1)]
    deciles = [sum(ordered[start:end], Counter()) for start, end in zip(edges, edges[1:], strict=False)]
    names = sorted({name for part in parts for name, tokens in part.items() if tokens})
    return {name: [part[name] / max(1, part.total()) for part in deciles] for name in names}


def account_lines(now: Account) -> list[str]:
    """Return an account as lines of a table."""
    rows = [(TRAINED, now.trained)]
    rows += [(f"left out: {reason}", tally) for reason, tally in now.left_out.items()]
    rows += [(f"waiting: {place}", tally) for place, tally in now.waiting.items()]
    width = max(len(name) for name, _ in (*rows, ("unaccounted", None)))
    lines = [f"{'tokens':{width}} {'groups':>9} {'rollouts':>9} {'tokens':>12} {'share':>7}"]
    for name, tally in rows:
        share = tally.tokens / max(1, now.sampled)
        lines.append(f"{name:{width}} {tally.groups:9} {tally.rollouts:9} {tally.tokens:12} {share:7.1%}")
    for name, tokens in (("unaccounted", now.unaccounted), ("sampled", now.sampled)):
        lines.append(f"{name:{width}} {'':9} {'':9} {tokens:12}")
    return lines


def length_lines(shares: Mapping[str, list[float]]) -> list[str]:
    """Return the shares by length as lines of a table; none without shares."""
    if not shares:
        return []
    width = max(map(len, shares))
    title = "share of the tokens by the length of their rollout, from the shortest tenth to the longest:"
    return [title, *(f"{name:{width}} {' '.join(f'{one:5.0%}' for one in parts)}" for name, parts in shares.items())]
