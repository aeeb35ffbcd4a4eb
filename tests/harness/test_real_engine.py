"""The unmodified agents against the real SGLang with a tiny random model: noise, recorded exactly, verdict 0.

What they recorded is computed again by the trainer's model, whatever became of it in the agent's hands.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.agents import INSTALLED
from harness.cli import main
from harness.run_dir import RunDir
from harness.setup.stack import START_SECONDS, ProxyOptions, RunningProxy, service
from proxy.engine.sglang import START_SECONDS as ENGINE_SECONDS
from proxy.pool.database import open_pool
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.finished_rollouts import finished_rollouts
from tests.conftest import need
from tests.harness.conftest import HELLO, results, write_tasks
from tests.harness.test_agents import need_agent

if TYPE_CHECKING:
    from tests.trainer.recompute import Recompute


@dataclass(frozen=True)
class Real:
    """A proxy before the real engine, and the directory of its model."""

    service: RunningProxy
    model: Path


@pytest.fixture(scope="module")
def sglang(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """What `harness run` brings up by itself."""
    need("SGLang", find_spec("sglang") is not None)
    directory = RunDir(tmp_path_factory.mktemp("sglang"))
    with directory.locked(), service(ProxyOptions(), directory) as running:
        yield Real(running, directory.path / "model")


def test_a_run_waits_for_its_engine_as_long_as_the_engine_may_load() -> None:
    assert START_SECONDS > ENGINE_SECONDS


@pytest.mark.long
@pytest.mark.timeout(600)  # the longest prompts have 30,000 tokens
@pytest.mark.parametrize("name", INSTALLED)
def test_an_unmodified_agent_talks_to_sglang_and_fails_honestly(
    name: str, sglang: Real, tmp_path: Path, recompute: "Recompute"
) -> None:
    need_agent(name)
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"timeout": 200})
    where = ["--run-dir", str(tmp_path / "run"), "--name", tmp_path.name, "--proxy", sglang.service.url]
    assert main(["run", str(tasks), "--agent", name, "--sandbox", "process", *where]) == 0
    (row,) = results(tmp_path / "run")
    assert row["reward"] == 0.0 and row["failure"] in (None, "agent_budget"), row
    assert row["trainable"] >= 1 and row["sampled_tokens"] >= 1
    pool = open_pool(sglang.service.pool)
    (rollout,) = finished_rollouts(pool, find_run(pool, tmp_path.name).id)
    again = recompute(sglang.model, rollout.completions)
    assert again.gap <= 1e-4 and again.tokens >= 1
