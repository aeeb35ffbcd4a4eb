"""What goes on in this process' sandboxes, in Prometheus' text format: how many there are, how starts go, what fails.

By host and image. Counted since the start, in memory. Left out: what a sandbox uses of its limits, which the engine's
own exporters tell.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds."""
STATES = ("starting", "live", "stopping")
At = tuple[str, str]
"""Host and image."""


@dataclass
class Starts:
    """A histogram of start latencies."""

    counts: list[int] = field(default_factory=lambda: [0] * len(BUCKETS))
    total: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.total += 1
        self.seconds += seconds
        for number, bound in enumerate(BUCKETS):
            self.counts[number] += seconds <= bound


@dataclass
class Metrics:
    """Gauges and counters of one process."""

    states: dict[str, Counter[At]] = field(default_factory=lambda: {state: Counter() for state in STATES})
    starts: dict[At, Starts] = field(default_factory=lambda: defaultdict(Starts))
    failures: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By host, image and kind: engine, disk, image, sandbox."""
    left_out: Counter[str] = field(default_factory=Counter)
    """How often a host was left out after a failure."""

    def text(self) -> str:
        """All of them, a family after the other."""
        gauges = [_family(f"sandboxes_{name}", "gauge", _by(self.states[name])) for name in STATES]
        failures = {_labels(host=h, image=i, kind=k): count for (h, i, k), count in self.failures.items()}
        left_out = {_labels(host=host): count for host, count in self.left_out.items()}
        return "".join(
            [
                *gauges,
                "# TYPE blackforge_sandbox_start_seconds histogram\n",
                *(line for at, starts in sorted(self.starts.items()) for line in _histogram(at, starts)),
                _family("sandbox_failures_total", "counter", failures),
                _family("sandbox_hosts_left_out_total", "counter", left_out),
            ]
        )


def _by(counts: Mapping[At, int]) -> dict[str, int]:
    return {_labels(host=host, image=image): count for (host, image), count in counts.items()}


def _histogram(at: At, starts: Starts) -> Iterator[str]:
    name = "blackforge_sandbox_start_seconds"
    for bound, count in [*zip(map(str, BUCKETS), starts.counts, strict=True), ("+Inf", starts.total)]:
        yield f"{name}_bucket{_labels(host=at[0], image=at[1], le=bound)} {count}\n"
    yield f"{name}_sum{_labels(host=at[0], image=at[1])} {starts.seconds:.6f}\n"
    yield f"{name}_count{_labels(host=at[0], image=at[1])} {starts.total}\n"


def _family(name: str, kind: str, values: Mapping[str, int]) -> str:
    lines = [f"blackforge_{name}{labels} {value}\n" for labels, value in sorted(values.items())]
    return f"# TYPE blackforge_{name} {kind}\n" + "".join(lines)


def _labels(**labels: str) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
