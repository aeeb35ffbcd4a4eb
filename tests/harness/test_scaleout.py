"""`--ray` on a cluster of three nodes on this machine: the head, which runs nothing, and two that work."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import select

from harness.async_pool import AsyncPool
from harness.cli import main
from harness.cluster.pickling import NodeSetup, pack, unpack
from harness.cluster.task_directories import (
    directories_of,
    make_place,
    pack_directories,
    unpack_directories,
    with_directories,
)
from harness.monitor.engine_presence import EnginePresence
from harness.rewards.function import RewardFunction
from harness.rollout.context import RunContext
from harness.run_dir import RunDir
from harness.setup.stack import ProxyOptions, RunningProxy, service
from proxy.pool.database import Pool, open_pool
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import attempts
from sandboxes.local.leftovers import ListedSandbox, list_sandboxes, remove_orphans
from sandboxes.local.process import ProcessSandboxes, default_root, remove
from sandboxes.local.processes import table
from tests import postgres
from tests.conftest import need
from tests.harness.conftest import HELLO, SHELL_AGENT, results
from tests.harness.test_run import PATIENT, CommandLine, finished, names, start, taken_over, wait_for

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

HERE = Path(__file__).parent
SMALL: dict[str, Any] = {"object_store_memory": 80 << 20, "include_dashboard": False}
HEALTH = {"health_check_period_ms": 500, "health_check_timeout_ms": 2000, "health_check_failure_threshold": 3}
PATIENCE = 400
"""Seconds; a cluster on a busy machine is slow to start its workers."""
SLOW = f"{SHELL_AGENT}; setsid sleep 600 & sleep 10"


@pytest.fixture(scope="module")
def proxy(postgres_server: postgres.Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """As the harness tests' own, with its pool on PostgreSQL."""
    directory = RunDir(tmp_path_factory.mktemp("service"))
    options = ProxyOptions(script=f"{HERE / 'scripts.py'}:hello", pool=postgres_server.database())
    with directory.locked(), service(options, directory) as running:
        yield running


@pytest.fixture
def pool(proxy: RunningProxy) -> Iterator[Pool]:
    opened = open_pool(proxy.pool)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator["Cluster"]:
    need("Ray (pip install 'blackforge[ray]')", find_spec("ray") is not None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    from ray.cluster_utils import Cluster  # a second, and only some tests need it

    cluster = Cluster(initialize_head=True, head_node_args=SMALL | {"num_cpus": 0, "_system_config": HEALTH})
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, **SMALL)
        yield cluster
    finally:
        cluster.shutdown()
        remove_orphans()  # workers are killed with their node


def sandboxes_of(node: Any) -> list[ListedSandbox]:
    """Those whose owner is a worker process of the node, with an agent at work."""
    workers = {process.pid for process in table() if process.parent == raylet(node)}
    return [sandbox for sandbox in list_sandboxes() if sandbox.owner in workers and sandbox.processes]


def all_sandboxes(cluster: "Cluster") -> list[ListedSandbox]:
    """Those of all nodes."""
    return [sandbox for node in cluster.worker_nodes for sandbox in sandboxes_of(node)]


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def kill(node: Any) -> list[ListedSandbox]:
    """Kill a node at once, as a power cut does, and say which sandboxes it leaves."""
    os.kill(raylet(node), signal.SIGSTOP)  # it must not tell anybody about its workers
    left = sandboxes_of(node)
    for process in table():
        if process.parent == raylet(node):
            os.kill(process.pid, signal.SIGKILL)
    os.kill(raylet(node), signal.SIGKILL)
    return left


@pytest.fixture
def on_ray(command_line: CommandLine, cluster: "Cluster", proxy: RunningProxy) -> CommandLine:
    def build(*more: str, **what: Any) -> list[str]:
        where = ["--pool", proxy.pool, "--ray", cluster.address]
        return command_line(*where, *more, **what)

    return build


def tries_of(pool: Pool, name: str) -> list[Any]:
    with pool.read() as connection:
        query = select(attempts).where(attempts.c.run_id == find_run(pool, name).id).order_by(attempts.c.id)
        return list(connection.execute(query))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_failed_attempt_is_retried_on_another_node_with_the_tasks_directories(
    on_ray: CommandLine, pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "given/deep").mkdir(parents=True)
    (tmp_path / "given/deep/word").write_text("hello\n")
    task = HELLO | {"directories": {"given": "given"}}
    task["verifier"] = {"command": "cmp given/deep/word hello.txt", "directories": {"given": "given"}}
    nodes = tmp_path / "nodes"  # the raylet is the parent of the worker process, which is the parent of the agent
    fail_once = f"cut -d' ' -f4 /proc/$PPID/stat >> {nodes}; test $(wc -l < {nodes}) = 2 || exit 1; {SHELL_AGENT}"
    assert main(on_ray(command=fail_once, tasks=[task])) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0]
    assert [row.failure for row in tries_of(pool, tmp_path.name)] == ["agent_crash", None]
    first, second = nodes.read_text().split()
    assert first != second


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ctrl_c_ends_the_agents_on_the_nodes_and_closes_their_attempts(
    on_ray: CommandLine, cluster: "Cluster", pool: Pool, tmp_path: Path
) -> None:
    run = start(on_ray("-n", "4", "--concurrency", "4", command=f"{SHELL_AGENT}; sleep 600"))
    wait_for(lambda: run.poll() is not None or len(all_sandboxes(cluster)) == 4, PATIENCE)
    run.send_signal(signal.SIGINT)
    output, _ = run.communicate(timeout=200)
    assert run.returncode == 130, output
    tries = tries_of(pool, tmp_path.name)
    assert {row.detail for row in tries} == {"the run was stopped while the attempt ran"}  # written by the nodes
    assert all_sandboxes(cluster) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_harness_that_was_replaced_ends_its_own_agents_only_on_the_nodes(
    on_ray: CommandLine, cluster: "Cluster", pool: Pool, tmp_path: Path
) -> None:
    run = start(on_ray(command=f"{SHELL_AGENT}; sleep 600"))
    wait_for(lambda: run.poll() is not None or len(all_sandboxes(cluster)) == 1, PATIENCE)
    theirs = taken_over(pool, find_run(pool, tmp_path.name).id)
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 2 and "another harness has taken over run" in output
    assert [row.id for row in tries_of(pool, tmp_path.name) if row.closed_at is None] == [theirs.id]
    assert all_sandboxes(cluster) == []


@contextmanager
def third_node(cluster: "Cluster", environment: dict[str, str]) -> Iterator[None]:
    """A node that is started with these variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        node = cluster.add_node(num_cpus=2, **SMALL)
    try:
        yield
    finally:
        cluster.remove_node(node)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_what_a_node_cannot_hold_is_tried_again_on_another_one(
    on_ray: CommandLine, cluster: "Cluster", pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / default_root().name).touch()  # where the node would keep its sandboxes
    with third_node(cluster, {"TMPDIR": str(tmp_path)}):
        assert main(on_ray("-n", "6", "--concurrency", "6", command=f"{SHELL_AGENT}; sleep 10")) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0] * 6
    assert [row.failure for row in tries_of(pool, tmp_path.name)] == [None] * 6


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_node_without_memory_costs_its_own_attempts_only(
    on_ray: CommandLine, cluster: "Cluster", pool: Pool, tmp_path: Path
) -> None:
    patient = f"{SHELL_AGENT}; while ! test -e {tmp_path}/open; do sleep 0.2; done"
    poor = {"RAY_memory_usage_threshold": "0.001", "RAY_memory_monitor_refresh_ms": "100"}
    with third_node(cluster, poor):
        run = start(on_ray("-n", "6", "--concurrency", "6", command=patient, tasks=[PATIENT]))
        try:
            wait_for(lambda: tmp_path.name in names(pool), PATIENCE)
            wait_for(lambda: run.poll() is not None or finished(pool, tmp_path.name) == 2, PATIENCE)
            (tmp_path / "open").touch()
            output, _ = run.communicate(timeout=400)
        finally:
            run.kill()
    assert run.returncode == 0, output
    rows = results(tmp_path / "run")
    assert Counter(row["failure"] for row in rows) == {None: 4, "interrupted": 2}
    assert all("running low on memory" in row["detail"] for row in rows if row["failure"])
    assert all(row.closed_at is not None for row in tries_of(pool, tmp_path.name))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_driver_leaves_what_its_next_start_removes_and_resumes(
    on_ray: CommandLine, cluster: "Cluster", pool: Pool, tmp_path: Path
) -> None:
    arguments = on_ray("-n", "4", "--concurrency", "4", command=SLOW)
    run = start(arguments)
    wait_for(lambda: run.poll() is not None or all(sandboxes_of(node) for node in cluster.worker_nodes), PATIENCE)
    left = {sandbox.id for node in cluster.worker_nodes for sandbox in sandboxes_of(node)}
    run.kill()
    run.communicate()
    wait_for(
        lambda: all(sandbox.orphaned for sandbox in list_sandboxes() if sandbox.id in left)
    )  # Ray ends a dead job's workers
    assert main(arguments) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0] * 4
    assert all(row.closed_at is not None for row in tries_of(pool, tmp_path.name))
    assert left and not left & {sandbox.id for sandbox in list_sandboxes()}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_lost_nodes_attempts_run_again_elsewhere_under_new_keys(
    on_ray: CommandLine, cluster: "Cluster", pool: Pool, tmp_path: Path
) -> None:
    arguments = on_ray("-n", "6", "--concurrency", "4", command=SLOW)
    run = start(arguments)
    try:
        wait_for(lambda: run.poll() is not None or all(sandboxes_of(node) for node in cluster.worker_nodes), PATIENCE)
        lost = kill(next(iter(cluster.worker_nodes)))
        output, _ = run.communicate(timeout=400)
    finally:
        run.kill()
    assert run.returncode == 0, output
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0] * 6
    tries = tries_of(pool, tmp_path.name)
    assert lost and Counter(row.failure for row in tries) == {None: 6, "interrupted": len(lost)}
    assert all(row.closed_at is not None for row in tries) and len({row.key_hash for row in tries}) == len(tries)
    assert all("Ray node was lost" in row.detail for row in tries if row.failure)
    assert all((tmp_path / "run/logs" / f"attempt-{row.id}.log").exists() for row in tries if not row.failure)
    assert main(arguments) == 0  # every node begins with a clean-up
    assert not {sandbox.id for sandbox in lost} & {sandbox.id for sandbox in list_sandboxes()}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_with_no_node_left_the_run_ends_with_a_sentence_and_nothing_is_lost(
    on_ray: CommandLine, cluster: "Cluster", pool: Pool, tmp_path: Path
) -> None:
    alive = [node for node in cluster.worker_nodes if raylet(node) in {process.pid for process in table()}]
    run = start(on_ray("-n", "6", "--concurrency", "6", command=f"{SHELL_AGENT}; sleep 600"))
    try:
        wait_for(lambda: run.poll() is not None or all(sandboxes_of(node) for node in alive), PATIENCE)
        for node in alive:
            kill(node)
        output, _ = run.communicate(timeout=400)
    finally:
        run.kill()
    assert run.returncode == 2 and "no node of the Ray cluster has 1 CPUs and 4096 MB for an attempt" in output, output
    tries = tries_of(pool, tmp_path.name)
    assert tries and {row.failure for row in tries} == {"interrupted"} and all(row.closed_at for row in tries)
    assert all(not row["finished"] for row in results(tmp_path / "run"))


def test_a_bench_travels_without_what_belongs_to_its_process(pool: Pool, proxy: RunningProxy, tmp_path: Path) -> None:
    context = RunContext(
        pool=AsyncPool(pool),
        sandboxes=ProcessSandboxes(),
        url=f"{proxy.url}/v1",
        model=proxy.model,
        context_length=proxy.context_length,
        logs=tmp_path / "here",
        trouble=proxy.trouble,
        end_calls=proxy.end_calls,
        engine=EnginePresence(proxy.url, proxy.admin_key),
        scorer=RewardFunction("examples.reward_function:brief"),
    )
    station = NodeSetup(pool=pool.url, make_sandboxes=ProcessSandboxes)
    there = unpack(pack(context), station.opened() | {"logs": Path(), "sandboxes": ProcessSandboxes()})
    assert (there.logs, there.pool.blocking.url, there.model) == (Path(), pool.url, context.model)
    assert there.pool.blocking is not pool and there.sandboxes is not context.sandboxes
    assert context.scorer is not None and there.scorer is None  # rewards are made where the run is
    asyncio.run(context.scorer.close())
    there.pool.blocking.close()


def test_a_tasks_directories_are_unpacked_elsewhere_and_named_there(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/run.sh").write_text("true")
    (tmp_path / "tests/run.sh").chmod(0o755)
    where = str(tmp_path / "tests")
    step: dict[str, Any] = {"verifier": {"directories": {"/tests": where}}, "directories": {}}
    data = {"directories": {"x": "kept"}, "image": {"directory": "kept"}}
    step["verifier"]["cases"] = [{"call": "m:f", "args": [data], "returns": data}]
    task = {"image": {"directory": where}, "steps": [step], "metadata": data}
    assert directories_of(task) == [where]
    root = make_place()
    unpack_directories(pack_directories([where]), root)
    there = with_directories(task, lambda source: str(root / source.lstrip("/")))
    copy = Path(there["steps"][0]["verifier"]["directories"]["/tests"]) / "run.sh"
    assert copy.is_relative_to(root) and copy.read_text() == "true" and copy.stat().st_mode & 0o777 == 0o755
    assert there["image"]["directory"] == str(copy.parent) and there["metadata"] == task["metadata"]
    remove(root)


@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--ray", "127.0.0.1:9"], "the Ray cluster 127.0.0.1:9 does not answer"),
        (["--ray", "127.0.0.1:70000"], "--ray is HOST:PORT of the cluster's head node, or auto, not: 127.0.0.1:70000"),
        (["--ray", "127.0.0.1:²"], "--ray is HOST:PORT of the cluster's head node, or auto, not: 127.0.0.1:²"),
        (["--ray", "ray://head"], "--ray is HOST:PORT of the cluster's head node, or auto, not: ray:"),
        (["--pool", "sqlite:///{tmp_path}/pool.db"], "is a file of this machine, which a cluster's nodes cannot write"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_one_sentence(
    command_line: CommandLine,
    proxy: RunningProxy,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: list[str],
    sentence: str,
) -> None:
    asked = ["--pool", proxy.pool, *(part.format(tmp_path=tmp_path) for part in more)]
    assert main(command_line("--ray", "auto", *asked)) == 2
    assert sentence in capsys.readouterr().err
