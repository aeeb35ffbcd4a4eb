"""The newest step's metrics for Prometheus: OUTPUT/metrics.prom, and a port of this machine's loopback.

The file is for the node exporter's textfile collector. Left out: histograms; the pool and TensorBoard have them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Metric, generate_latest, start_http_server
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from proxy.pool.errors import UserError
from proxy.pool.files import write_whole
from trainer.report.exporters import scalars

METRICS = "metrics.prom"


class StepMetrics(Collector):
    """Holds what was written last."""

    def __init__(self, run: str):
        self._run = run
        self._newest: tuple[int, float, dict[str, float]] | None = None
        """Step, when it was published, and metrics: one value, as the server reads while another thread writes."""

    def set(self, step: int, at: float, metrics: Mapping[str, Any]) -> None:
        """Take a step's metrics in the place of the last one's."""
        self._newest = step, at, dict(scalars(metrics))

    def collect(self) -> Iterator[Metric]:
        """Yield the gauges; without values before the first step."""
        step = GaugeMetricFamily("blackforge_trainer_step", "The newest published step.", labels=["run"])
        at = GaugeMetricFamily(
            "blackforge_trainer_published_timestamp_seconds", "When it was published.", labels=["run"]
        )
        values = GaugeMetricFamily(
            "blackforge_trainer_metric", "A number of the newest step, by family/name.", labels=["run", "metric"]
        )
        if (newest := self._newest) is not None:
            step.add_metric([self._run], newest[0])
            at.add_metric([self._run], newest[1])
            for name, value in newest[2].items():
                values.add_metric([self._run, name], value)
        yield from (step, at, values)


class Prometheus:
    """Writes the file, and serves `/metrics` where a port is given. UserError if the port is taken."""

    name = "prometheus"

    def __init__(self, file: Path, run: str, port: int):
        self._file = file
        self._metrics = StepMetrics(run)
        self._registry = CollectorRegistry()
        self._registry.register(self._metrics)
        self._server = None
        if port:
            try:
                self._server, _ = start_http_server(port, "127.0.0.1", self._registry)
            except OSError as error:
                raise UserError(
                    f"report.metrics_port = {port} cannot be used ({error.strerror}); choose another port"
                ) from error

    def write(self, step: int, at: float, metrics: Mapping[str, Any]) -> None:
        """Replace the last step's metrics."""
        self._metrics.set(step, at, metrics)
        write_whole(self._file, generate_latest(self._registry))

    def close(self) -> None:
        """Free the port."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
