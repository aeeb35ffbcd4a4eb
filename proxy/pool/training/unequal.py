"""Finds the groups of equal rewards whose process rewards differ, so that they are trained and not skipped.

Process rewards follow from what rollouts did, which takes all of an attempt's completions to read. Their figures are
kept on the rollout's row when they are first asked for. Left out: the rule itself (proxy/pool/behaviour/process.py).
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from sqlalchemy import Connection, select, update

from proxy.pool.behaviour.process import ProcessRule, TurnFigures, differ, figures, turn_rewards
from proxy.pool.completions.store import IDS_PER_QUERY, labelled, of_attempts
from proxy.pool.schema import attempts, rollouts

_MEMBERS = select(
    rollouts.c.id, rollouts.c.group_id, rollouts.c.attempt_id, rollouts.c.reward_parts, rollouts.c.behaviour,
    attempts.c.closed_at,
).outerjoin_from(rollouts, attempts, attempts.c.id == rollouts.c.attempt_id)  # fmt: skip

Figures = Mapping[int, list[TurnFigures]]
"""Rollout -> its figures."""


def unequal(connection: Connection, rollout_ids: Collection[int], rule: ProcessRule) -> tuple[set[int], Figures]:
    """Return which groups of these rollouts have different process rewards, and the figures that no row has yet."""
    members = _members(connection, rollout_ids)
    missing = {m.id: m.attempt_id for m in members if m.behaviour is None and m.attempt_id is not None}
    chains = of_attempts(connection, list(missing.values()), experts=False)
    made = {id: figures(labelled(chains[attempt_id])) for id, attempt_id in missing.items()}
    rewards: dict[int, list[list[float]]] = {}
    rule = rule.without_length
    for m in members:
        known = made.get(m.id) or msgspec.convert(m.behaviour or [], list[TurnFigures])
        rewards.setdefault(m.group_id, []).append(turn_rewards(known, m.reward_parts or {}, rule)[0])
    closed = {m.id for m in members if m.closed_at is not None}
    return {id for id, some in rewards.items() if differ(some)}, {id: made[id] for id in made.keys() & closed}


def known(connection: Connection, rollout_ids: Collection[int]) -> bool:
    """Whether all of these rollouts have figures."""
    return all(m.behaviour is not None or m.attempt_id is None for m in _members(connection, rollout_ids))


def keep(connection: Connection, made: Figures) -> None:
    """Write figures to their rollouts."""
    for id, some in made.items():
        connection.execute(update(rollouts).where(rollouts.c.id == id).values(behaviour=msgspec.to_builtins(some)))


def _members(connection: Connection, rollout_ids: Collection[int]) -> list[Any]:
    ids = sorted(rollout_ids)
    batches = (ids[start : start + IDS_PER_QUERY] for start in range(0, len(ids), IDS_PER_QUERY))
    return [row for some in batches for row in connection.execute(_MEMBERS.where(rollouts.c.id.in_(some)))]
