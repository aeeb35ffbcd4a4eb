"""The curve over the window as an SVG: steps per hour and shift, one line for each workload."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, TOP = 640, 200, 60, 40
"""Of one of the two charts; the margins are at the left and above."""
COLOURS = {"long_tailed": "#0b6e99", "moderate": "#d9730d"}
NAMES = {"long_tailed": "long-tailed", "moderate": "moderate"}


def curve(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Draw all policies with the queue limit of `windowed`, by their window. The last place has none (greedy)."""
    limit = cases["long_tailed"]["windowed"]["queue_limit"]
    over = {
        workload: sorted(
            (case for case in policies.values() if case["queue_limit"] == limit),
            key=lambda case: float(case["window"] or "inf"),
        )
        for workload, policies in cases.items()
    }
    windows = [str(case["window"] or "none") for case in over["long_tailed"]]
    speed = {
        workload: [case["steps_per_hour"] / cases[workload]["synchronous"]["steps_per_hour"] for case in some]
        for workload, some in over.items()
    }
    shift = {workload: [case["shift"] for case in some] for workload, some in over.items()}
    charts = [
        chart("steps per hour, synchronous = 1", windows, speed, 0, doublings=True),
        chart("shift of what is trained (KL, nats)", windows, shift, 1),
    ]
    whole = 2 * (HEIGHT + 2 * TOP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2 * LEFT} {whole}" '
        'font-family="sans-serif" font-size="13">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{"".join(charts)}</svg>\n'
    )


def chart(
    title: str, windows: Sequence[str], lines: Mapping[str, Sequence[float]], row: int, doublings: bool = False
) -> str:
    """One chart. Its places are equally far apart, whatever the windows. `doublings`: 1, 2, 4 ... are, upwards."""
    bottom = TOP + row * (HEIGHT + 2 * TOP) + HEIGHT
    highest = max(max(values) for values in lines.values())
    places = [LEFT + WIDTH * at / (len(windows) - 1) for at in range(len(windows))]
    ticks = [highest * quarter / 4 for quarter in range(5)]
    if doublings:
        ticks = [2.0**power for power in range(math.ceil(math.log2(highest)) + 1)]
        highest = ticks[-1]

    def height(value: float) -> float:
        return bottom - HEIGHT * (math.log2(value) / math.log2(highest) if doublings else value / highest)

    parts = [f'<text x="{LEFT}" y="{bottom - HEIGHT - 14}" font-weight="bold">{title}</text>\n']
    for tick in ticks:
        y = height(tick)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>\n')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.0f}" text-anchor="end">{tick:.3g}</text>\n')
    for x, window in zip(places, windows, strict=True):
        label = f"W = {window}" if x == LEFT else window
        parts.append(f'<text x="{x:.0f}" y="{bottom + 18}" text-anchor="middle">{label}</text>\n')
    for at, (workload, values) in enumerate(lines.items()):
        points = [(x, height(value)) for x, value in zip(places, values, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = COLOURS[workload]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>\n')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>\n' for x, y in points]
        x, y = LEFT + WIDTH - 180 + 95 * at, bottom - HEIGHT - 14
        parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{NAMES[workload]}</text>\n')
    return "".join(parts)
