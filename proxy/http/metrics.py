"""The proxy's metrics for Prometheus: calls by run and dialect, rows not yet committed, failures by kind, retries.

Counted since the proxy started, in memory, and collected when somebody asks: each proxy has its own, nothing is
registered globally. Left out: latencies and tokens, which the pool has for every completion.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from proxy.http.admission import AdmissionGate


@dataclass(eq=False)
class ProxyMetrics(Collector):
    """The counters of one proxy. Only its event loop changes them, so plain integers without a lock will do."""

    admission: AdmissionGate
    """Counts the calls in flight and those that wait, by run."""
    uncommitted: Callable[[], int]
    """Returns how many completions wait for their commit."""
    cut: Counter[str]
    """Connections that the proxy closed, by reason (proxy/http/connections.py)."""
    answered: Counter[str] = field(default_factory=Counter)
    """Calls whose client got the whole answer, by dialect."""
    failures: Counter[str] = field(default_factory=Counter)
    """Counts by the error code that the client was sent."""
    continued: Counter[str] = field(default_factory=Counter)
    """How calls continue what was recorded, by the names of proxy/prompt/splice.py."""
    unfit: Counter[str] = field(default_factory=Counter)
    """Answers without the form that their request prescribes, by that form."""
    repeated: int = 0
    """Answers that were ended because they repeated themselves."""
    served_again: int = 0
    abandoned: int = 0

    def collect(self) -> Iterator[Metric]:
        """Yield every metric with its values of now."""
        in_flight = GaugeMetricFamily("blackforge_calls_in_flight", "Calls being answered.", labels=["run"])
        waiting = GaugeMetricFamily("blackforge_calls_waiting", "Calls waiting for admission.", labels=["run"])
        for family, calls in ((in_flight, self.admission.inside), (waiting, self.admission.waiting)):
            for run, count in calls.items():
                family.add_metric([str(run)], count)
        yield from (in_flight, waiting)
        yield GaugeMetricFamily(
            "blackforge_uncommitted_completions", "Completions waiting for their commit.", value=self.uncommitted()
        )
        answered = CounterMetricFamily("blackforge_calls_answered", "Calls answered whole.", labels=["dialect"])
        failures = CounterMetricFamily("blackforge_failures", "Calls answered with an error.", labels=["kind"])
        continued = CounterMetricFamily(
            "blackforge_continued_calls", "Calls that continue a recorded completion.", labels=["how"]
        )
        unfit = CounterMetricFamily(
            "blackforge_unfit_answers", "Answers without the form that their request prescribes.", labels=["form"]
        )
        counted = (
            (answered, self.answered),
            (failures, self.failures),
            (continued, self.continued),
            (unfit, self.unfit),
        )
        for counter, counts in counted:
            for label, count in counts.items():
                counter.add_metric([label], count)
        yield from (answered, failures, continued, unfit)
        yield CounterMetricFamily(
            "blackforge_answers_served_again", "Answers sent once more to a retry.", value=self.served_again
        )
        yield CounterMetricFamily(
            "blackforge_stopped_repetitions", "Answers ended because they repeated themselves.", value=self.repeated
        )
        cut = CounterMetricFamily("blackforge_cut_connections", "Connections that the proxy closed.", labels=["reason"])
        for reason, count in self.cut.items():
            cut.add_metric([reason], count)
        yield cut
        yield CounterMetricFamily("blackforge_abandoned_calls", "Calls whose client went away.", value=self.abandoned)

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self).decode()
