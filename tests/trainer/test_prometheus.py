"""The newest step's metrics for Prometheus, as file and at a port."""

import socket
import sys
import threading
from pathlib import Path
from urllib.request import urlopen

import pytest

from proxy.engine.process import free_port
from proxy.pool.errors import UserError
from trainer.report.prometheus import METRICS, Prometheus, StepMetrics

METRICS_OF_A_STEP = {"reward_mean": 0.5, "seconds": {"train": 2.0}, "staleness_tokens": {"0": 3}, "loss": float("nan")}


def test_the_file_and_the_port_have_the_newest_step(tmp_path: Path) -> None:
    port = free_port()
    exporter = Prometheus(tmp_path / METRICS, "run", port)
    exporter.write(1, 10.0, {"reward_mean": 0.25})
    exporter.write(2, 20.0, METRICS_OF_A_STEP)
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        served = answer.read().decode()
    exporter.close()
    assert served == (tmp_path / METRICS).read_text()
    lines = [line for line in served.splitlines() if not line.startswith("#")]
    assert lines == [
        'blackforge_trainer_step{run="run"} 2.0',
        'blackforge_trainer_published_timestamp_seconds{run="run"} 20.0',
        'blackforge_trainer_metric{metric="reward/reward_mean",run="run"} 0.5',
        'blackforge_trainer_metric{metric="seconds/train",run="run"} 2.0',
    ]
    Prometheus(tmp_path / METRICS, "run", port).close()  # the port is free again, as after a rollback


def test_a_look_during_a_step_finds_one_step_whole() -> None:
    metrics, looks, before = StepMetrics("run"), 20_000, sys.getswitchinterval()
    metrics.set(0, 0.0, {"reward_mean": 0.0})
    ended = threading.Event()

    def steps() -> None:
        step = 0
        while not ended.is_set():
            step += 1
            metrics.set(step, float(step), {"reward_mean": float(step)})

    writer = threading.Thread(target=steps)
    sys.setswitchinterval(1e-6)
    try:
        writer.start()
        found = [[family.samples[0].value for family in metrics.collect()] for _ in range(looks)]
    finally:
        ended.set()
        writer.join()
        sys.setswitchinterval(before)
    assert [values for values in found if len(set(values)) > 1] == []


def test_a_taken_port_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(UserError, match="report.metrics_port = .* cannot be used"):
            Prometheus(tmp_path / METRICS, "run", taken.getsockname()[1])
