"""The states of the monitor's rules for Prometheus: one gauge for each rule and state, 1 for the state it is in."""

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from proxy.pool.inspect.rule_states import RuleNow

LEVELS = ("ok", "watch", "alarm")


class RuleMetrics(Collector):
    """Holds the states that were read last."""

    def __init__(self) -> None:
        self.rules: Sequence[RuleNow] = ()
        self.paused = False
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges."""
        states = GaugeMetricFamily(
            "blackforge_monitor_state", "Rules of the monitor by state", labels=["rule", "state"]
        )
        for rule in self.rules:
            for level in LEVELS:
                states.add_metric([rule.name, level], float(rule.level == level))
        yield states
        yield GaugeMetricFamily("blackforge_monitor_paused", "Whether the monitor has paused the run", self.paused)

    def text(self) -> str:
        """Return the gauges as Prometheus reads them."""
        return generate_latest(self._registry).decode()
