"""A run's metrics on a port and in a file."""

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from harness.monitor.metrics import shown
from proxy.engine.process import free_port
from proxy.pool.errors import UserError
from sandboxes.metrics import SandboxMetrics
from tests.harness.conftest import HELLO, SHELL_AGENT

CURL = f"{sys.executable} -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:{{port}}/metrics\").read().decode())'"


async def test_the_port_tells_what_goes_on_now_and_is_closed_at_the_end(tmp_path: Path) -> None:
    metrics, port = SandboxMetrics(), free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    async with shown(metrics.text, port, tmp_path / "run.prom"), ClientSession() as client:
        metrics.live.labels("a host", 'an "image"').inc(3)
        metrics.start_seconds.labels("a host", "").observe(0.3)
        text = await (await client.get(url)).text()
        assert 'blackforge_sandboxes_live{host="a host",image="an \\"image\\""} 3.0\n' in text
        buckets = {line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in text.splitlines()}
        assert buckets['blackforge_sandbox_start_seconds_bucket{host="a host",image="",le="0.25"}'] == "0.0"
        assert buckets['blackforge_sandbox_start_seconds_bucket{host="a host",image="",le="0.5"}'] == "1.0"
        assert buckets['blackforge_sandbox_start_seconds_bucket{host="a host",image="",le="+Inf"}'] == "1.0"
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


async def test_the_file_holds_the_last_state(tmp_path: Path) -> None:
    metrics = SandboxMetrics()
    async with shown(metrics.text, None, tmp_path / "run.prom"):
        assert "blackforge_sandboxes_live gauge" in (tmp_path / "run.prom").read_text()
        metrics.failures.labels("a", "b", "engine").inc()
    assert (
        'blackforge_sandbox_failures_total{host="a",image="b",kind="engine"} 1.0\n'
        in (tmp_path / "run.prom").read_text()
    )


async def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"^port {port} cannot be used for metrics .*; choose another$"):
            async with shown(str, port, tmp_path / "run.prom"):
                pass


async def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    async with shown(lambda: "live 1\n", None, directory / "metrics.prom"):
        assert not directory.exists()
        directory.mkdir()
    assert (directory / "metrics.prom").read_text() == "live 1\n"
    async with shown(lambda: "live 2\n", None, directory / "metrics.prom"):
        (directory / "metrics.prom").unlink()
        directory.rmdir()


def test_a_run_shows_its_sandboxes(run: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    port = free_port()
    command = f"{SHELL_AGENT}; {CURL.format(port=port)} > hello.metrics"
    look = {"command": 'test "$(cat hello.txt)" = hello && grep -F \'live{host="process",image=""} 1.0\' hello.metrics'}
    rows = run("--metrics-port", str(port), command=command, tasks=[HELLO | {"verifier": look}])
    assert [row["reward"] for row in rows] == [1.0]
    text = (tmp_path / "run" / "metrics.prom").read_text()
    assert 'blackforge_sandboxes_live{host="process",image=""} 0.0\n' in text
    assert 'blackforge_sandbox_start_seconds_count{host="process",image=""} 1.0\n' in text
