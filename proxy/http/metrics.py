"""What goes on in this proxy, in Prometheus' text format: calls by run, rows on their way, failures by kind, retries.

Counted since the start, in memory. Left out: latencies and tokens, which the pool has for every completion.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.http.admission import Gate


@dataclass
class Metrics:
    """Counters of one proxy."""

    failures: Counter[str] = field(default_factory=Counter)
    """By code: what clients were told."""
    continued: Counter[str] = field(default_factory=Counter)
    """How calls were joined to what was recorded, by the names of proxy/prompt/splice.py."""
    served_again: int = 0
    abandoned: int = 0

    def text(self, uncommitted: int, admission: Gate) -> str:
        """All of them, a family after the other. `uncommitted`: completions that wait for their commit."""
        families = [
            _family("calls_at_work", "gauge", {f'{{run="{run}"}}': n for run, n in admission.inside.items()}),
            _family("calls_waiting", "gauge", {f'{{run="{run}"}}': n for run, n in admission.waiting.items()}),
            _family("uncommitted_completions", "gauge", {"": uncommitted}),
            _family("failures_total", "counter", {f'{{kind="{kind}"}}': n for kind, n in self.failures.items()}),
            _family("continued_calls_total", "counter", {f'{{how="{how}"}}': n for how, n in self.continued.items()}),
            _family("answers_served_again_total", "counter", {"": self.served_again}),
            _family("abandoned_calls_total", "counter", {"": self.abandoned}),
        ]
        return "".join(families)


def _family(name: str, kind: str, values: Mapping[str, int]) -> str:
    lines = [f"blackforge_{name}{labels} {value}\n" for labels, value in sorted(values.items())]
    return f"# TYPE blackforge_{name} {kind}\n" + "".join(lines)
