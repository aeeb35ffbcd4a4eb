"""The unmodified agents before an engine that breaks off in the middle of every turn, once: they ask again and finish.

Left out: qwen-code, which ends at the first broken stream, whatever it is told, and gemini-cli, which ends at the
second.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cli import main
from harness.run_dir import RunDir
from harness.setup.stack import ProxyOptions, RunningProxy, service
from proxy.pool.database import open_pool
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.finished_rollouts import finished_rollouts
from tests.harness.conftest import HELLO, HERE, results, write_tasks
from tests.harness.test_agents import OPENCODES, need_agent

AGENTS = ("claude-code", "codex", "mini-swe-agent", "native", *OPENCODES)


@pytest.fixture(scope="module")
def breaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    directory = RunDir(tmp_path_factory.mktemp("breaking"))
    with directory.locked(), service(ProxyOptions(script=f"{HERE / 'scripts.py'}:failing"), directory) as running:
        yield running


@pytest.mark.long
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_asks_again_when_the_engine_breaks_off(name: str, breaking: RunningProxy, tmp_path: Path) -> None:
    need_agent(name)
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"timeout": 240})
    where = ["--run-dir", str(tmp_path / "run"), "--name", name, "--proxy", breaking.url]
    assert main(["run", str(tasks), "--agent", name, "--sandbox", "process", *where]) == 0
    (row,) = results(tmp_path / "run")
    assert (row["reward"], row["failure"], row["attempts"]) == (1.0, None, 1), row
    pool = open_pool(breaking.pool)
    (rollout,) = finished_rollouts(pool, find_run(pool, name).id)
    broken = [item for item in rollout.completions if item.finish_reason == "error"]
    whole = [item for item in rollout.completions if item.untrainable is None]
    assert whole and len(broken) + len(whole) == len(rollout.completions)
    assert broken or name in ("mini-swe-agent", "native")  # which do not stream: nothing of what was sampled had come
