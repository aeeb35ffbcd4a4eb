"""The place of every attempt's tokens: a reason to be left out, a place on the way to a step, or a step."""

from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, case, func, literal, null, select

from proxy.pool.rollouts.counts import OWN_TOKENS
from proxy.pool.schema import attempts, completions, fates, groups, rollouts, runs
from proxy.pool.training.fates import Tally
from proxy.pool.untrained import LISTED_DETAILS, UntrainedReason

CALLED_OFF = {kind: f"{UntrainedReason.ROLLOUT_FAILED}: {kind}" for kind in ("redundant", "filtered")}
"""Failures of members that were cancelled. They may be ended after a step has taken their group, so their attempts tell
what they sampled, and not the step."""
CONSUMED = "consumed"
"""The place of tokens that a step took: its fates tell what it did with them."""


def tallies(connection: Connection, run_id: int, which: ColumnElement[bool]) -> dict[str, Tally]:
    """Sum up, by place, the tokens of the groups of a run that `which` selects."""
    inner = placed(run_id).where(which).subquery()
    counts = [func.count(inner.c[name].distinct()) for name in ("group_id", "rollout_id")]
    query = select(inner.c.place, *counts, func.sum(inner.c.tokens)).group_by(inner.c.place)
    return {place: Tally(*map(int, values)) for place, *values in connection.execute(query)}


def placed(run_id: int) -> Select[Any]:
    """Select every attempt of a run with its place; rollouts without one have a row, too."""
    other = attempts.alias()
    newest = select(func.max(other.c.id)).where(other.c.rollout_id == rollouts.c.id).scalar_subquery()
    detail = case((groups.c.reason.in_(LISTED_DETAILS), groups.c.detail), else_=null())
    set_aside = func.coalesce(groups.c.reason + literal(": ") + detail, groups.c.reason, "reason_not_stored")
    fate = select(fates.c.completion_id).join_from(fates, completions).where(completions.c.attempt_id == attempts.c.id)
    without_attempt = rollouts.c.finished_at.is_not(None) & rollouts.c.attempt_id.is_(None) & attempts.c.id.is_not(None)
    replaced = attempts.c.id != func.coalesce(rollouts.c.attempt_id, newest)
    interrupted = rollouts.c.finished_at.is_(None) & (attempts.c.failure == "interrupted")  # only another can go on
    place = case(
        (func.coalesce(groups.c.purpose, runs.c.purpose) == "eval", UntrainedReason.HELD_OUT.value),
        (rollouts.c.failure.in_(CALLED_OFF), _failed(rollouts.c.failure)),
        (replaced | interrupted, UntrainedReason.RETRIED.value),
        (groups.c.state == "TOMBSTONE", set_aside),
        (without_attempt, func.coalesce(_failed(rollouts.c.failure), UntrainedReason.NO_REWARD.value)),
        (rollouts.c.finished_at.is_(None), "sampling"),
        (groups.c.state.in_(("RUNNING", "DONE")), "queued"),
        ((groups.c.state == "LEASED") & fate.exists(), "reopened"),
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


def _failed(kind: ColumnElement[Any]) -> ColumnElement[Any]:
    return literal(f"{UntrainedReason.ROLLOUT_FAILED}: ") + kind
