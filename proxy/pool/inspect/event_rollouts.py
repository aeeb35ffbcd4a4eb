"""From a kind of event to the rollouts of a run that show it, with the place where each shows it first."""

from dataclasses import dataclass

from proxy.pool.behaviour.event import Kind
from proxy.pool.behaviour.read import events
from proxy.pool.behaviour.statistics import own_work
from proxy.pool.database import Pool
from proxy.pool.inspect.run_behaviour import finished_rollouts, with_chains

MOST = 50
"""Rollouts that are listed, the newest ones."""


@dataclass(frozen=True)
class EventRollout:
    """A finished rollout that shows an event."""

    rollout: int
    attempt: int
    """The attempt that gave it its outcome, and in which the event is."""
    task: str
    agent: str
    step: int | None
    """The train step that took its group; None: none has."""
    reward: float | None
    failure: str | None
    count: int
    """How often the event happened."""
    completion: int
    """The completion that showed it first, by id."""
    turn: int
    """The place of that completion among the rollout's own turns, from 1."""


@dataclass(frozen=True)
class EventRollouts:
    """The rollouts of a run that show an event."""

    rollouts: list[EventRollout]
    """The newest ones, the newest first."""
    total: int
    """How many there are in all."""
    looked_at: int
    """The finished rollouts of the run whose completions are in the pool."""


def event_rollouts(pool: Pool, run_id: int, kind: Kind, most: int = MOST) -> EventRollouts:
    """Return the rollouts of a run that show this kind of event, as `harness behaviour` counts it.

    Rollouts that have left the pool for an archive are left out, and what a rollout replays of a recorded one.
    """
    rows = finished_rollouts(pool, run_id)[::-1]
    found: list[EventRollout] = []
    total = 0
    for row, chain in with_chains(pool, rows):
        work = own_work(chain)
        shown = [event.completion for event in events(work) if event.kind == kind]
        total += bool(shown)
        if not shown or len(found) == most:
            continue
        turn = next(number for number, item in enumerate(work, 1) if item.id == shown[0])
        place = (row.rollout_id, row.id, row.name, row.agent, row.step, row.reward, row.failure)
        found.append(EventRollout(*place, count=len(shown), completion=shown[0], turn=turn))
    return EventRollouts(found, total, len(rows))
