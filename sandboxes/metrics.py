"""Metrics of this process's sandboxes for Prometheus: how many there are, how long starts take, what fails.

Most metrics are split by host and image. They live in memory and start at zero with the process. Left out: how much of
its limits a sandbox uses, because Docker's own exporters report that.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest

BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds in seconds."""
WHERE = ("host", "image")


class _Registry(CollectorRegistry):
    """Leaves out the `_created` series, which double the output. The library can only switch them off globally."""

    def collect(self) -> Iterator[Metric]:
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class SandboxMetrics:
    """The metrics of the sandboxes that one process starts (sandboxes/fleet.py)."""

    def __init__(self) -> None:
        own = self.registry = _Registry(auto_describe=True)
        self.starting = Gauge("blackforge_sandboxes_starting", "Sandboxes being started.", WHERE, registry=own)
        self.live = Gauge("blackforge_sandboxes_live", "Sandboxes in use.", WHERE, registry=own)
        self.stopping = Gauge("blackforge_sandboxes_stopping", "Sandboxes being removed.", WHERE, registry=own)
        self.start_seconds = Histogram(
            "blackforge_sandbox_start_seconds",
            "Time from the request to a running sandbox.",
            WHERE,
            buckets=BUCKETS,
            registry=own,
        )
        self.failures = Counter(
            "blackforge_sandbox_failures",
            "Failures by kind: daemon, disk, image, sandbox.",
            (*WHERE, "kind"),
            registry=own,
        )
        self.hosts_left_out = Counter(
            "blackforge_sandbox_hosts_left_out", "Times a failed host was avoided for a while.", ["host"], registry=own
        )

    def text(self) -> str:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry).decode()
