"""Fixtures that every part shares. A part that is missing skips a test at home and fails it when CI=true."""

import atexit
import gc
import os
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from proxy.pool.database import Pool, open_pool
from sandboxes.docker.bundles import VOLUMES
from sandboxes.docker.labels import PID
from tests import postgres

if TYPE_CHECKING:
    from tests.trainer.recompute import Recompute
    from trainer.megatron.parallel import Ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""For all tests and what they start: waiting OpenMP threads spin, so tests of tiny models took ten times the CPU time
beside other tests."""
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


SANDBOXES = (
    "harness", "sandboxes", "test_benchmarks.py", "test_demo.py", "test_everything.py", "test_pages.py",
    "test_stored_data.py", "survival",
)  # fmt: skip
"""Tests that start runs, which remove what dead owners left, or that leave such things on purpose."""
APART = {
    *(f"harness/test_{name}.py" for name in (
        "carried", "cheating", "cheating_run", "checkers", "cleanstart", "compose", "daemons", "fresh_docker", "harbor",
        "harbor_docker", "isolation", "loop", "math_answers", "not_stopped", "rewards", "rollout", "run_dir", "sources",
        "task_input", "tasks", "verifier",
    )),
    *(f"sandboxes/docker/test_{name}.py" for name in (
        "bundles", "client_config", "daemon", "files", "freezing", "images", "labels", "own_daemon", "presence",
        "profiles", "reach", "remote_sources", "run", "runtime", "services", "supply",
    )),
    *(f"sandboxes/test_{name}.py" for name in (
        "bubblewrap", "bundles", "clocks", "files", "probe", "process", "relay",
    )),
    "harness/native/test_context.py", "harness/native/test_tools.py",
}  # fmt: skip
"""Those of the same rooms that do neither: each file may run beside any other."""
ENGINE = {
    f"proxy/test_{name}.py"
    for name in ("logprobs", "prefill", "prefix_reuse", "recomputed", "sglang", "splice", "structured_output")
}
"""Tests that share the session's real engine, which takes half a minute to start."""
RUNS = {
    *(f"harness/test_{name}.py" for name in (
        "admin_key", "agents", "agents_faults", "augmented_prompts", "docker_agents", "engine_outage", "real_engine",
        "replay", "validate",
    )),
    "harness/native/test_run.py", "survival/test_survival.py", "test_benchmarks.py", "test_demo.py",
    "test_everything.py", "test_pages.py", "test_stored_data.py",
}  # fmt: skip
"""Tests of SANDBOXES that start runs and leave nothing on purpose: each file may run beside any other, as soon as all
that leave something have ended."""
BY_TEST = ("test_demo.py", "test_pages.py")
"""Files of few long tests, each of which may run beside the others."""
BY_LAST_PARAMETER = ("harness/test_cheating.py",)
"""Files of hundreds of tests, of which one group for each value of the last parameter may run beside the others."""
FIRST = (
    "trainer/test_pushes.py", "sandboxes", "test_pages.py", "test_demo.py", "test_everything.py",
    "harness/test_real_engine.py", "survival/test_survival.py", "engine", "trainer/test_loop.py",
    "trainer/test_tree.py", "pool/test_account.py", "harness/test_engine_outage.py", "trainer/test_engine.py",
    "harness/test_harbor_docker.py", "harness/test_cheating.py", "harness/test_docker_agents.py",
    "harness/test_rollout.py", "harness/test_validate.py", "trainer/test_ranks.py", "harness/test_agents.py",
    "proxy/test_zoo.py", "test_benchmarks.py",
)  # fmt: skip
"""What takes longest, longest first, so that no worker has much left when the others are done. Before it, pushes: an
engine of theirs starts only where 10 GiB of memory are free, and the workers take more of it the longer they run."""


gc.disable()  # while all is loaded, which makes hardly any garbage


def pytest_collection_finish() -> None:
    """Let garbage collections skip what is loaded by now, torch among it, and come less often."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # or Triton's nanobind reports it as leaked
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Say which tests share a worker of pytest-xdist and in which order they start.

    The library's own groups (`--dist loadgroup`, 3.8.0) have no effect with pytest 9.2. Its own order is by number of
    tests, so that files of one long test would come last and end alone.
    """
    from xdist.scheduler import LoadScopeScheduling  # only there where tests run in workers

    class RoomScheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0].removeprefix("tests/")
            if file in ENGINE:
                return "engine"
            if file in BY_TEST:
                return f"{file} {nodeid.partition('::')[2]}"
            if file in BY_LAST_PARAMETER:
                return f"{file} {nodeid.rpartition('-')[2]}"
            sandboxes = file.split("/")[0] in SANDBOXES and file not in APART and file not in RUNS
            return "sandboxes" if sandboxes else file

        def _assign_work_unit(self, node: Any) -> None:
            leaves = (one for one, units in self.assigned_work.items() if not all(units.get("sandboxes", {}).values()))
            leaving = next(leaves, None)
            scopes = [scope for scope in self.workqueue if leaving is None or scope.split()[0] not in RUNS]
            if not scopes:  # nothing else fills the time, as few tests were chosen
                node, scopes = leaving, list(self.workqueue)
            first = min(
                scopes, key=lambda scope: FIRST.index(file) if (file := scope.split()[0]) in FIRST else len(FIRST)
            )
            self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return RoomScheduling(config, log)


def need(what: str, present: bool) -> None:
    """Skip the running test for lack of `what`; in CI, where everything must be there, fail instead."""
    if present:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is missing, and CI must have it")
    pytest.skip(f"{what} is missing")


@pytest.fixture(scope="session")
def empty_pool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of an empty pool. To copy it takes a fifth of the time that it takes to make one."""
    file = tmp_path_factory.mktemp("empty") / "pool.db"
    open_pool(str(file)).close()
    return file


@pytest.fixture
def pool(tmp_path: Path, empty_pool: Path) -> Pool:
    """A fresh pool in a temporary SQLite file."""
    shutil.copy(empty_pool, tmp_path / "pool.db")
    return open_pool(str(tmp_path / "pool.db"))


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.Server]:
    """A PostgreSQL server of this test session."""
    installed = postgres.binaries()
    need("PostgreSQL (apt-get install postgresql; pip install blackforge[postgres])", installed is not None)
    assert installed is not None
    with postgres.running(installed) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database: tests that take it run on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'pool.db'}"
    server: postgres.Server = request.getfixturevalue("postgres_server")
    return server.database()


@pytest.fixture(scope="session")
def docker_daemon() -> Iterator[str]:
    """The address of a Docker daemon with the images bb:1 and deb:py. Nothing of these tests may be left there."""
    client = shutil.which("docker")
    need("a Docker client (apt-get install docker.io)", client is not None)
    images = subprocess.run(["docker", "image", "inspect", "bb:1", "deb:py"], capture_output=True, text=True)
    need(f"a Docker daemon with images bb:1 and deb:py ({images.stderr.strip()})", images.returncode == 0)
    yield os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    ours = ["--quiet", "--filter", f"label={PID}={os.getpid()}"]
    for kind in (["container", "ls", "--all"], ["network", "ls"], ["volume", "ls"]):
        listed = subprocess.run(["docker", *kind, *ours], capture_output=True, text=True, check=True).stdout.split()
        left = [name for name in listed if not name.startswith(VOLUMES)]  # a daemon keeps its bundles
        assert not left, f"docker {kind[0]}s that tests left: {left}"


@pytest.fixture(scope="session")
def ranks() -> Iterator["Ranks"]:
    """The only rank of a training job in the test process; Megatron's groups are global, so there is one."""
    need("megatron-core", find_spec("megatron") is not None)
    from trainer.config import Parallel
    from trainer.megatron.parallel import process_groups  # loads torch, which only some tests need

    os.environ.update(ALONE)
    with process_groups(Parallel()) as ranks:
        for name in ALONE:  # what other tests start is no rank
            del os.environ[name]
        yield ranks


@pytest.fixture(scope="session")
def recompute(ranks: "Ranks", tmp_path_factory: pytest.TempPathFactory) -> "Recompute":
    """The trainer's logprobs of recorded completions."""
    from tests.trainer.recompute import Recompute  # loads torch, which only some tests need

    return Recompute(ranks, tmp_path_factory.mktemp("recompute"))
