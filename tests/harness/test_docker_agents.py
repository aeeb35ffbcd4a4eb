"""The unmodified agents in hardened containers, through the real proxy, with the verifier's reward.

A scripted engine plays the model: it solves the example Harbor tasks with the agent's own shell tool, and calls the
tool of a task's MCP server. CI runs what fits its time; the long tests run each agent at each task, and each in an
image that has nothing but a C library and bash.
"""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.agents import INSTALLED
from harness.agents.bundles import runtime
from harness.cli import main
from harness.run_dir import RunDir
from harness.setup.stack import ProxyOptions, RunningProxy, service
from proxy.engine.tiny_model import make_tiny_model
from sandboxes.docker.labels import labels_of, this_process
from tests.conftest import need
from tests.harness.conftest import HELLO, ROOMY, results, write_tasks
from tests.harness.oracle import HARBOR
from tests.harness.scripts import CHECKED
from tests.harness.test_agents import WITH_MCP, WORDS, need_agent

TASKS = sorted(path.name for path in HARBOR.iterdir())
IN_CI = {"mini-swe-agent": ["late-orders"]}
WITH_SHELL = sorted(set(INSTALLED) - {"aider"})
LIBRARIES = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libtinfo.so.6")


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory, docker_daemon: str) -> Iterator[RunningProxy]:
    """A real proxy with a socket for sandboxes, before an engine that knows the solutions."""
    need("the runtime (harness agents install runtime)", runtime.PACKAGE.installed_version() == runtime.PACKAGE.version)
    directory = RunDir(tmp_path_factory.mktemp("service"))
    make_tiny_model(model := tmp_path_factory.mktemp("models") / "model", seed=0, sizes=ROOMY)
    options = ProxyOptions(
        model=model,
        script=f"{Path(__file__).with_name('oracle.py')}:oracle",
        for_sandboxes={"sandbox_socket": str(tmp_path_factory.mktemp("socket") / "proxy.sock")},
    )
    with directory.locked(), service(options, directory) as running:
        yield running


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example tasks, from an image that the tests' engine has."""
    copied = shutil.copytree(HARBOR, tmp_path_factory.mktemp("tasks") / "harbor")
    for dockerfile in copied.glob("*/environment/Dockerfile"):
        dockerfile.write_text(dockerfile.read_text().replace("FROM debian:bookworm-slim", "FROM deb:py"))
    return copied


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image of busybox, a C library and bash: no Python, no Node.js, no git."""
    root, name = tmp_path_factory.mktemp("root"), f"blackforge-test/bare:{this_process().pid}"
    for directory in ("bin", "etc", "tmp", "proc", "sys", "dev", "lib64"):
        (root / directory).mkdir()
    shutil.copy("/bin/busybox", root / "bin")
    shutil.copy("/bin/bash", root / "bin")
    applets = subprocess.run(["/bin/busybox", "--list"], capture_output=True, text=True, check=True).stdout.split()
    for applet in set(applets) - {"busybox", "bash"}:
        (root / "bin" / applet).symlink_to("busybox")
    linked = subprocess.run(["ldd", "/bin/bash"], capture_output=True, text=True, check=True).stdout
    system = Path(next(word for word in linked.split() if word.endswith("/libc.so.6"))).parent
    libraries = root / system.relative_to("/")  # where its loader looks for them
    libraries.mkdir(parents=True)
    shutil.copy(next(Path("/lib64").glob("ld-linux*")), root / "lib64")
    for library in LIBRARIES:
        shutil.copy(system / library, libraries)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    packed = subprocess.run(["tar", "-C", root, "-c", "."], capture_output=True, check=True).stdout
    labels = [f'--change=LABEL {key}="{value}"' for key, value in labels_of("image", this_process()).items() if value]
    subprocess.run(["docker", "import", "--change=ENV PATH=/bin", *labels, "-", name], input=packed, check=True)
    yield name
    subprocess.run(["docker", "rmi", "--force", name], check=True, capture_output=True)


def worked(tmp_path: Path, proxy: RunningProxy, *what: str) -> list[dict[str, Any]]:
    """The rows of a run in containers. Big agents are not uploaded, which would take longer than their work."""
    where = ["--run-dir", str(tmp_path / "run"), "--name", tmp_path.name, "--proxy", proxy.url]
    bundles = "volume" if {"codex", "qwen-code"} & {*what} else "bind"
    assert main(["run", *what, "--sandbox", "docker", "--bundles", bundles, "--concurrency", "2", *where]) == 0
    return results(tmp_path / "run")


PYTHON = "deb:py"
"""An image that can run the tests' MCP servers."""
SERVED_WORDS = WORDS | {
    "files": {},
    "services": [
        {
            "name": "words",
            "image": {"name": PYTHON},
            "command": ["python3", "-c", Path(__file__).with_name("mcp_over_http.py").read_text(), "8000"],
            "env": {"WORD": "quince"},
            "ready": "python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8000)).close()'",
        }
    ],
    "mcp": [{"name": "words", "url": "http://words:8000/mcp"}],
}
"""The same task, whose MCP server runs in a service beside the sandbox."""


def solved(row: dict[str, Any]) -> bool:
    whole: bool = (row["reward"], row["failure"], row["attempts"]) == (1.0, None, 1)
    return whole and row["completions"] == row["trainable"] > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "which"),
    [
        *(pytest.param(name, which, id=name) for name, which in IN_CI.items()),
        *(pytest.param(name, TASKS, id=f"{name}, all", marks=pytest.mark.long) for name in WITH_SHELL),
    ],
)
def test_an_agent_in_a_container_solves_harbor_tasks(
    name: str, which: list[str], tasks: Path, proxy: RunningProxy, tmp_path: Path
) -> None:
    need_agent(name)
    rows = worked(tmp_path, proxy, *(str(tasks / task) for task in which), "--agent", name)
    assert [row for row in rows if not solved(row)] == []
    assert len(rows) == len(which)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "codex" else pytest.mark.long) for name in sorted(INSTALLED)]
)
def test_an_agent_works_in_a_strict_container_of_an_image_without_interpreters(
    name: str, bare: str, proxy: RunningProxy, tmp_path: Path
) -> None:
    need_agent(name)
    file = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"instruction": CHECKED, "timeout": 240})
    (row,) = worked(tmp_path, proxy, str(file), "--agent", name, "--image", bare)
    assert solved(row), row


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "native" else pytest.mark.long) for name in WITH_MCP]
)
def test_the_tools_of_a_tasks_mcp_server_reach_an_agent_in_its_container(
    name: str, proxy: RunningProxy, tmp_path: Path
) -> None:
    need_agent(name)
    file = write_tasks(tmp_path / "tasks.jsonl", WORDS)
    (row,) = worked(tmp_path, proxy, str(file), "--agent", name, "--image", PYTHON)
    assert solved(row), row


@pytest.mark.long
@pytest.mark.parametrize("name", ["native", "openai-agents"])
def test_an_mcp_server_over_http_in_a_service_of_the_task_reaches_an_agent_in_its_container(
    name: str, proxy: RunningProxy, tmp_path: Path
) -> None:
    need_agent(name)
    file = write_tasks(tmp_path / "tasks.jsonl", SERVED_WORDS)
    (row,) = worked(tmp_path, proxy, str(file), "--agent", name, "--image", PYTHON)
    assert solved(row), row
