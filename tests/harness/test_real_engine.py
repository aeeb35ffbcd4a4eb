"""The unmodified agents against the real SGLang with a tiny random model: noise, recorded exactly, verdict 0."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.agents import INSTALLED
from harness.cli import main
from harness.rundir import RunDir
from harness.services import Service, Wanted, service
from tests.conftest import need
from tests.harness.conftest import HELLO, results, write_tasks
from tests.harness.test_agents import need_agent

IN_CI = ("mini-swe-agent", "opencode")
AGENTS = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in INSTALLED]


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """What `harness run` brings up by itself."""
    need("SGLang", find_spec("sglang") is not None)
    directory = RunDir(tmp_path_factory.mktemp("sglang"))
    with directory.held(), service(Wanted(), directory) as running:
        yield running


@pytest.mark.parametrize("name", AGENTS)
def test_an_unmodified_agent_talks_to_sglang_and_fails_honestly(name: str, sglang: Service, tmp_path: Path) -> None:
    need_agent(name)
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"timeout": 200})
    where = ["--run-dir", str(tmp_path / "run"), "--name", tmp_path.name, "--proxy", sglang.url]
    assert main(["run", str(tasks), "--agent", name, *where]) == 0
    (row,) = results(tmp_path / "run")
    assert row["reward"] == 0.0 and row["failure"] in (None, "agent_timeout"), row
    assert row["trainable"] >= 1 and row["sampled_tokens"] >= 1
