"""What came of the places in recorded attempts at which a run's rollouts began, as a table."""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import case, func, select

from proxy.pool.database import Pool
from proxy.pool.rollouts.failures import DIFFERED
from proxy.pool.rollouts.masked import MASKED
from proxy.pool.rollouts.starts import SUCCESS
from proxy.pool.schema import groups, rollouts, tasks


@dataclass(frozen=True)
class StartRow:
    """The rollouts of a run that began with the same turns of one recorded attempt."""

    task: str
    attempt_id: int
    """The recorded attempt."""
    turns: int
    """How many of its turns they replayed."""
    rollouts: int
    rewards: int
    """How many of these have a reward that counts."""
    solved: int
    differed: int
    """Those that left the recorded attempt before."""


def start_table(pool: Pool, run_id: int) -> list[StartRow]:
    """Return a row for each recorded attempt and number of turns that groups of the run have begun with."""
    counts = rollouts.c.reward.is_not(None) & ~MASKED
    place = (tasks.c.name, groups.c.start_attempt_id, groups.c.start_turns)
    query = (
        select(
            *place,
            func.count(),
            func.count(case((counts, 1))),
            func.count(case((counts & (rollouts.c.reward >= SUCCESS), 1))),
            func.count(case((rollouts.c.failure == DIFFERED, 1))),
        )
        .join_from(groups, rollouts)
        .join(tasks, tasks.c.id == groups.c.task_id)
        .where(groups.c.run_id == run_id, groups.c.start_attempt_id.is_not(None))
        .group_by(*place)
        .order_by(tasks.c.name, groups.c.start_attempt_id, groups.c.start_turns.desc())
    )
    with pool.read() as connection:
        return [StartRow(*row) for row in connection.execute(query)]


def start_lines(rows: Sequence[StartRow]) -> list[str]:
    """Return the rows as lines of a table; none without rows."""
    if not rows:
        return []
    width = max(len("begun with"), *(len(row.task) for row in rows))
    lines = [f"{'begun with':{width}} {'attempt':>9} {'turns':>6} {'rollouts':>9} {'solved':>9} {'differed':>9}"]
    for row in rows:
        solved = f"{row.solved}/{row.rewards}"
        places = f"{row.attempt_id:9} {row.turns:6} {row.rollouts:9} {solved:>9} {row.differed:9}"
        lines.append(f"{row.task:{width}} {places}")
    return lines
