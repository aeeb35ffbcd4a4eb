"""The behaviour of a run's rollouts, added up by step, agent, domain, task or tool."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any, Literal

from sqlalchemy import Row, select

from proxy.pool.behaviour.statistics import Statistics, of_rollout
from proxy.pool.completions.records import Completion
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
    for row, chain in with_chains(pool, finished_rollouts(pool, run_id)):
        figures = _figures(row, chain)
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
    rows, halves = finished_rollouts(pool, run_id), dict[str, tuple[list[float], list[float]]]()
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


def finished_rollouts(pool: Pool, run_id: int) -> list[Row[Any]]:
    """Return the finished rollouts of a run that are in the pool, in the order in which they began.

    The `id` of a row is that of the attempt that gave the rollout its outcome.
    """
    columns = (groups.c.step, attempts.c.agent, tasks.c.domain, tasks.c.name, rollouts.c.reward, attempts.c.id)
    outcome = (rollouts.c.id.label("rollout_id"), rollouts.c.failure)
    looked_at = (rollouts.c.hacked, rollouts.c.integrity.is_not(None).label("looked_at"))
    finished = (groups.c.run_id == run_id) & rollouts.c.finished_at.is_not(None) & groups.c.dropped_at.is_(None)
    query = select(*columns, *outcome, *looked_at).join_from(rollouts, groups, groups.c.id == rollouts.c.group_id)
    query = query.join(tasks, tasks.c.id == groups.c.task_id).join(attempts, attempts.c.id == rollouts.c.attempt_id)
    with pool.read() as connection:
        return list(connection.execute(query.where(finished).order_by(rollouts.c.id)))


def with_chains(pool: Pool, rows: Sequence[Row[Any]]) -> Iterator[tuple[Row[Any], list[Completion]]]:
    """Yield each of these finished rollouts with its labelled completions."""
    for start in range(0, len(rows), ATTEMPTS_AT_ONCE):
        some = rows[start : start + ATTEMPTS_AT_ONCE]
        with pool.read() as connection:
            chains = of_attempts(connection, [row.id for row in some], experts=False)
        for row in some:
            yield row, labelled(chains[row.id])


def _figures(row: Row[Any], chain: Sequence[Completion]) -> Statistics:
    return of_rollout(chain, row.reward, (row.hacked is not None) if row.looked_at else None)
