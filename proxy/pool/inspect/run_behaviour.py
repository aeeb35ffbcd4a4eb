"""The behaviour of a run's rollouts, added up by step, agent, domain, task or tool."""

from collections.abc import Iterator
from statistics import fmean
from typing import Any, Literal

from sqlalchemy import Row, select

from proxy.pool.behaviour.statistics import Statistics, of_rollout
from proxy.pool.completions.store import labelled, of_attempts
from proxy.pool.database import Pool
from proxy.pool.schema import attempts, groups, rollouts, tasks

By = Literal["step", "agent", "domain", "task", "tool"]
ATTEMPTS_AT_ONCE = 16
"""Attempts whose completions are in memory together."""
UNTRAINED = "-"
"""Stands for the step of groups that no step has taken."""


def run_behaviour(pool: Pool, run_id: int, by: By) -> dict[str, Statistics]:
    """Return the figures of the run's finished rollouts by the value of `by`, in the order of the values.

    Steps are in the order of their numbers, and what no step has taken comes last. Rollouts that have left the pool for
    an archive are left out. By tool, a rollout counts for each tool that it used.
    """
    sums: dict[str, Statistics] = {}
    for row, figures in _rollouts(pool, run_id):
        keys = figures.tools if by == "tool" else [_key(row, by)]
        for key in keys:
            part = of_tool(figures, key) if by == "tool" else figures
            sums.setdefault(key, Statistics()).merge(part)
    return dict(sorted(sums.items(), key=lambda pair: _place(pair[0], by)))


def _place(key: str, by: By) -> tuple[bool, int, str]:
    numbered = by == "step" and key != UNTRAINED
    return (by == "step" and not numbered, int(key) if numbered else 0, key)


def reward_trend(pool: Pool, run_id: int, by: By) -> dict[str, tuple[float | None, float | None]]:
    """Return the mean rewards of the first and the second half of a run's rollouts, in the order in which they began.

    None: no rollout of that half has a reward.
    """
    rows, halves = _finished(pool, run_id), dict[str, tuple[list[float], list[float]]]()
    for place, row in enumerate(rows):
        half = halves.setdefault(_key(row, by), ([], []))[place >= len(rows) // 2]
        half.extend([] if row.reward is None else [row.reward])
    return {
        key: (fmean(first) if first else None, fmean(second) if second else None)
        for key, (first, second) in halves.items()
    }


def of_tool(figures: Statistics, tool: str) -> Statistics:
    """Return the figures of a rollout that are about one tool. Its turns and times are not kept by tool."""
    return Statistics(
        rollouts=figures.rollouts,
        rewards=figures.rewards,
        reward_sum=figures.reward_sum,
        tools={tool: figures.tools[tool]},
        commands=type(figures.commands)(
            {name: count for name, count in figures.commands.items() if name.partition(": ")[0] == tool}
        ),
    )


def _key(row: Row[Any], by: By) -> str:
    if by == "step":
        return UNTRAINED if row.step is None else str(row.step)
    return str({"agent": row.agent, "domain": row.domain, "task": row.name}[by])


def _finished(pool: Pool, run_id: int) -> list[Row[Any]]:
    columns = (groups.c.step, attempts.c.agent, tasks.c.domain, tasks.c.name, rollouts.c.reward, attempts.c.id)
    looked_at = (rollouts.c.hacked, rollouts.c.integrity.is_not(None).label("looked_at"))
    finished = (groups.c.run_id == run_id) & rollouts.c.finished_at.is_not(None) & groups.c.dropped_at.is_(None)
    query = select(*columns, *looked_at).join_from(rollouts, groups, groups.c.id == rollouts.c.group_id)
    query = query.join(tasks, tasks.c.id == groups.c.task_id).join(attempts, attempts.c.id == rollouts.c.attempt_id)
    with pool.read() as connection:
        return list(connection.execute(query.where(finished).order_by(rollouts.c.id)))


def _rollouts(pool: Pool, run_id: int) -> Iterator[tuple[Row[Any], Statistics]]:
    rows = _finished(pool, run_id)
    for start in range(0, len(rows), ATTEMPTS_AT_ONCE):
        some = rows[start : start + ATTEMPTS_AT_ONCE]
        with pool.read() as connection:
            chains = of_attempts(connection, [row.id for row in some], experts=False)
        for row in some:
            yield (
                row,
                of_rollout(labelled(chains[row.id]), row.reward, (row.hacked is not None) if row.looked_at else None),
            )
