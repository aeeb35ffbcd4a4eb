"""A real proxy in front of a scripted engine, shared by all tests of the harness, and runs against it."""

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

import pytest

from harness.cli import main
from harness.run_dir import RunDir
from harness.setup.stack import ProxyOptions, RunningProxy, service
from proxy.engine.tiny_model import TinySizes, make_tiny_model
from sandboxes.local.process import ProcessSandbox, ProcessSandboxes

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SHELL_AGENT = f"{sys.executable} -I -S {ROOT / 'examples/agents/shell_agent.py'}"
HELLO = {
    "id": "hello",
    "instruction": "Write hello.txt",
    "verifier": {"command": 'test "$(cat hello.txt)" = hello', "timeout": 30},
    "timeout": 60,
}
ROOMY = TinySizes(context=65536)
"""For qwen-code with an MCP server: its prompt has 29,000 tokens then, and it compacts at 0.7 of the context."""


@pytest.fixture(scope="session")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """The scripted engine of scripts.py:hello behind a real proxy, with a listener for sandboxes."""
    directory = RunDir(tmp_path_factory.mktemp("service"))
    make_tiny_model(directory.path / "model")  # as the service would in a process of its own, which loads torch anew
    with TemporaryDirectory(dir="/tmp") as short, directory.locked():
        options = ProxyOptions(
            script=f"{HERE / 'scripts.py'}:hello", for_sandboxes={"sandbox_socket": f"{short}/door/proxy.sock"}
        )
        with service(options, directory) as running:
            yield running


def push(proxy: RunningProxy, version: str) -> None:
    """Give the engine the name of a published version, as a trainer's push does."""
    with urlopen(f"{proxy.url}/health") as answer:
        engine = json.load(answer)["engine"]["url"]
    body = json.dumps({"new_version": version}).encode()
    urlopen(Request(f"{engine}/update_weight_version", body, {"Content-Type": "application/json"})).close()


@pytest.fixture
def sandboxes(tmp_path: Path) -> ProcessSandboxes:
    """Process sandboxes, for tests that need no isolation."""
    return ProcessSandboxes(tmp_path / "sandboxes")


@pytest.fixture
async def sandbox(sandboxes: ProcessSandboxes) -> AsyncIterator[ProcessSandbox]:
    sandbox = await sandboxes.start()
    yield sandbox
    await sandbox.stop()


def write_tasks(path: Path, *tasks: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path


@pytest.fixture
def command_line(proxy: RunningProxy, tmp_path: Path) -> Callable[..., list[str]]:
    """Arguments for a run of tasks in a directory and under a name of the test's own."""

    def build(*more: str, tasks: list[dict[str, Any]] | None = None, command: str | None = SHELL_AGENT) -> list[str]:
        file = write_tasks(tmp_path / "tasks.jsonl", *([HELLO] if tasks is None else tasks))
        where = ["--run-dir", str(tmp_path / "run"), "--name", tmp_path.name, "--proxy", proxy.url]
        agent = [] if command is None else ["--agent", "command", "--command", command]
        return ["run", str(file), *agent, "--sandbox", "process", *where, *more]

    return build


@pytest.fixture
def run(command_line: Callable[..., list[str]], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run to the end and give the rows of results.jsonl."""

    def to_the_end(*more: str, **what: Any) -> list[dict[str, Any]]:
        assert main(command_line(*more, **what)) == 0
        return results(tmp_path / "run")

    return to_the_end


def results(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "results.jsonl").read_text().splitlines()]
