"""Machines: the processes of a pool, the phases of steps, sandbox hosts, and what proxies say of their replicas."""

from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from proxy.pool.browse.machines import machines
from proxy.pool.database import open_pool
from proxy.pool.processes.deliveries import register_proxy
from proxy.pool.processes.owners import owned
from proxy.pool.rollouts.runs import find_run
from tests.proxy.dashboard.conftest import Visit, Visitor
from tests.proxy.dashboard.make import plant, story

METRICS = """\
# TYPE blackforge_sandboxes_live gauge
blackforge_sandboxes_live{host="a",image="one"} 2
blackforge_sandboxes_live{host="a",image="two"} 3
# TYPE blackforge_sandbox_start_seconds histogram
blackforge_sandbox_start_seconds_bucket{host="a",image="one",le="+Inf"} 4
blackforge_sandbox_start_seconds_count{host="a",image="one"} 4
blackforge_sandbox_start_seconds_sum{host="a",image="one"} 6
# TYPE blackforge_sandbox_failures counter
blackforge_sandbox_failures_total{host="a",image="one",kind="daemon"} 1
"""


async def test_phases_traffic_and_runs_come_from_the_pool(visitor: Visitor) -> None:
    got = (await visitor.ask("machines"))["machines"]
    assert [step["step"] for step in got["phases"]["train"]] == [1, 2, 3]
    assert got["phases"]["train"][0]["seconds"]["train"] == 8.0
    calls = {each["run"]: each["calls"] for each in got["traffic"]}
    assert calls["sessions"] == 1 and calls["train"] > 8 and got["traffic_of"] == sum(calls.values())
    assert got["proxies"] == [] and got["hosts"] == []


def test_processes_and_sandbox_hosts_are_named(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    story(pool)
    register_proxy(pool)
    (tmp_path / "whereabouts.json").write_bytes(msgspec.json.encode({"pool": pool.url, "name": "train"}))
    (tmp_path / "metrics.prom").write_text(METRICS)
    with owned(pool, find_run(pool, "train")):
        now = machines(pool)
    [proxy], [host] = now.proxies, now.hosts
    assert proxy.alive and proxy.ended_at is None
    assert (host.host, host.live, host.failures, host.start_seconds) == ("a", 5.0, 1.0, 1.5)
    train = next(run for run in now.runs if run.name == "train")
    assert train.harness is not None and train.harness.alive and train.state == "paused"
    assert (train.running, train.cut_off) == (1, 0)
    (tmp_path / "metrics.prom").write_text("{{{ no metrics")
    with owned(pool, find_run(pool, "train")):
        assert machines(pool).hosts == []
    pool.close()


@pytest.mark.parametrize("name", ["whereabouts.json", "metrics.prom"])
@pytest.mark.parametrize("kind", ["pipe", "link", "endless link", "huge"])
def test_a_directory_beside_the_pool_makes_nobody_wait_or_read_more(tmp_path: Path, name: str, kind: str) -> None:
    """Others may write there. A pipe without a writer would hold the thread for ever, /dev/zero take all memory."""
    pool = open_pool(str(tmp_path / "pool.db"))
    story(pool)
    where = {"pool": pool.url, "name": "train"}
    (tmp_path / "whereabouts.json").write_bytes(msgspec.json.encode(where))
    (tmp_path / "metrics.prom").write_text(METRICS)
    with owned(pool, find_run(pool, "train")):
        assert len(machines(pool).hosts) == 1
        plant(tmp_path / name, kind)
        assert machines(pool).hosts == [] or (name, kind) == ("metrics.prom", "huge")  # its first part is read
    pool.close()


async def test_a_proxy_is_asked_for_its_replicas(visit: Visit, tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    replica = {"url": "http://engine", "state": "closed", "version": "v3", "in_flight": 2, "failures": 0, "queue": 1}

    async def health(request: web.Request) -> web.Response:
        known = request.headers.get("Authorization") == "Bearer key"
        return web.json_response({"status": "ok", "model": "m", "replicas": [replica]} if known else {"status": "ok"})

    app = web.Application()
    app.router.add_get("/health", health)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    visitor = await visit(pool.url, proxies=[url, "http://127.0.0.1:9"], admin_key="key")
    served, away = (await visitor.ask("machines"))["proxies"]
    assert served["replicas"] == [replica] and served["model"] == "m" and "does not answer" in away["trouble"]
    visitor = await visit(pool.url, proxies=[url])
    [untold] = (await visitor.ask("machines"))["proxies"]
    assert "--admin-key-file" in untold["trouble"]
    await runner.cleanup()
    pool.close()
