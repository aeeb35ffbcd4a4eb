"""Curves over the train steps of a run: any metric by its name, at evenly spread steps where there are too many."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.schema import policy_versions, train_steps
from proxy.pool.training.steps import HISTOGRAMS

MOST_POINTS = 400
"""Steps of a curve. Metrics of a step take some ten kilobytes."""
MOST_CURVES = 64
"""Metrics that are asked for at once."""
NAMED_STEPS = 8
"""Steps that are looked at for the names of metrics. A metric that none of them has can still be asked for by name."""
SUMS = ("left_out_so_far",)
"""Metrics whose values are [groups, rollouts, tokens]."""


@dataclass(frozen=True)
class Curves:
    """Metrics of some steps of a run. The lists have one entry for each step."""

    steps: list[int]
    published_at: list[float]
    versions: list[int]
    values: dict[str, list[float | None]]
    """None: the step does not have it."""
    histograms: dict[str, list[dict[str, float]]]
    first: int
    """The first and the last step of the run, and how many of those in between were asked for and left out."""
    last: int
    left_out: int


def step_range(connection: Connection, run_id: int) -> tuple[int, int] | None:
    """Return the first and the last published step of a run that no rollback has retired; None: there is none."""
    current = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None)
    ordered = select(policy_versions.c.step).where(current)
    first = connection.scalar(ordered.order_by(policy_versions.c.step).limit(1))
    last = connection.scalar(ordered.order_by(policy_versions.c.step.desc()).limit(1))
    return None if first is None or last is None else (first, last)


def spread(first: int, last: int, points: int) -> list[int]:
    """Return at most `points` steps from first to last, evenly spread, with both ends."""
    if last < first:
        return []
    if last - first < points:
        return list(range(first, last + 1))
    return [first + round(place * (last - first) / (points - 1)) for place in range(points)]


def of_steps(connection: Connection, run_id: int, wanted: Sequence[int], columns: Iterable[Any]) -> Sequence[Row[Any]]:
    """Return these columns of these steps of a run, in order."""
    current = (policy_versions.c.run_id == run_id) & policy_versions.c.retired_at.is_(None)
    query = select(*columns).join_from(policy_versions, train_steps, train_steps.c.version_id == policy_versions.c.id)
    return connection.execute(
        query.where(current, policy_versions.c.step.in_(wanted)).order_by(policy_versions.c.step)
    ).all()


def metric_names(pool: Pool, run_id: int) -> list[str]:
    """Return the names of the metrics that some steps of a run have, in order: `name`, or `family/key`.

    Histograms are among them.
    """
    with snapshot(pool) as connection:
        bounds = step_range(connection, run_id)
        if bounds is None:
            return []
        rows = of_steps(connection, run_id, spread(*bounds, NAMED_STEPS), (train_steps.c.metrics,))
    counted = {name for row in rows for name in HISTOGRAMS if _histogram(row.metrics.get(name))}
    return sorted(counted | {name for row in rows for name, _ in flat(row.metrics)})


def curves(
    pool: Pool,
    run_id: int,
    names: Sequence[str],
    first: int | None = None,
    last: int | None = None,
    points: int = MOST_POINTS,
) -> Curves:
    """Return metrics by their names, from step `first` to step `last` of a run (default: all of it).

    UserError when more than MOST_CURVES are asked for.
    """
    if len(names) > MOST_CURVES:
        raise UserError(f"{len(names)} metrics are asked for at once, and {MOST_CURVES} is the limit; ask for fewer")
    with snapshot(pool) as connection:
        bounds = step_range(connection, run_id)
        if bounds is None:
            return Curves([], [], [], {name: [] for name in names}, {}, 0, 0, 0)
        begin = max(bounds[0], bounds[0] if first is None else first)
        end = min(bounds[1], bounds[1] if last is None else last)
        wanted = spread(begin, end, min(points, MOST_POINTS))
        columns = (policy_versions.c.id, policy_versions.c.step, policy_versions.c.created_at, train_steps.c.metrics)
        rows = of_steps(connection, run_id, wanted, columns)
    steps = [dict(flat(row.metrics)) for row in rows]
    return Curves(
        steps=[row.step for row in rows],
        published_at=[row.created_at for row in rows],
        versions=[row.id for row in rows],
        values={name: [each.get(name) for each in steps] for name in names if name not in HISTOGRAMS},
        histograms={name: [_histogram(row.metrics.get(name)) for row in rows] for name in names if name in HISTOGRAMS},
        first=bounds[0],
        last=bounds[1],
        left_out=max(0, end - begin + 1 - len(wanted)),
    )


def flat(metrics: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Yield (name, value) of every finite number in the metrics of a step; the name in a family is `family/key`."""
    for name, value in metrics.items():
        if isinstance(value, Mapping) and name not in (*HISTOGRAMS, *SUMS):
            yield from ((f"{name}/{key}", float(part)) for key, part in value.items() if _finite(part))
        elif name == "alarms" and isinstance(value, Sequence):
            yield "alarms", float(len(value))
        elif _finite(value):
            yield name, float(value)


def _histogram(value: Any) -> dict[str, float]:
    return {str(key): float(part) for key, part in value.items() if _finite(part)} if isinstance(value, dict) else {}


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
