"""The unmodified agents, driven through the real proxy by a script: tool calls, the recorded tree, a passing verifier.

Sub-agents and compaction are live for opencode and codex. CI runs five agents (IN_CI); most other cases are long.
"""

import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.agents import INSTALLED
from harness.agents.base import Endpoint
from harness.agents.bundles.install import PACKAGES, bundle_at
from harness.agents.mcp_forms import file_text
from harness.agents.mix import Scaffold, check_servers
from harness.agents.sdk.adapter import SDK_AGENTS
from harness.cli import main
from harness.commands.agents import bundles_of
from harness.run_dir import RunDir
from harness.setup.stack import ProxyOptions, RunningProxy, service
from harness.tasks import Task
from harness.tasks.schema import McpServer
from proxy.engine.tiny_model import make_tiny_model
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.finished_rollouts import finished_rollouts
from tests.conftest import need
from tests.harness import scripts
from tests.harness.conftest import HELLO, ROOMY, SHELL_AGENT, results, write_tasks
from tests.harness.live import Conversation, Line, tree, write_table

HERE = Path(__file__).parent
IN_CI = ("mini-swe-agent", "opencode", "codex", "qwen-code", "native")
AGENTS = [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in sorted(INSTALLED)]
TABLE = "BLACKFORGE_AGENTS_TABLE"
"""The environment variable that names the file for the table of live runs."""


def case(name: str, instruction: str, *expected: Conversation, long: bool = False) -> Any:
    return pytest.param(
        name,
        instruction,
        sorted(expected),
        marks=pytest.mark.long if long or name not in IN_CI else (),
        id=f"{name}: {instruction}",
    )


def work(*words: str) -> Conversation:
    return Conversation("main", words)


def halves(shell: str) -> Iterator[Conversation]:
    for command in scripts.HALVES.values():
        yield Conversation("subagent", (shell, f"Done: {command}"))


def summary(after: str = "") -> Conversation:
    return Conversation("compaction", (scripts.SUMMARY,), after)


def checked(shell: str, last: str = "Done and checked.") -> Conversation:
    return work(shell, f"{shell}, {shell}", last)


TITLE = Conversation("side", ("A title",))
EDIT = " ".join(scripts.WHOLE_FILE.split())
SUMMARISED = "Done after the summary."
OPENCODE_SHARED = (TITLE, work("task, task", "bash", "Done with helpers."), *halves("bash"))
OPENCODE_LONG = (
    TITLE,
    work("bash", "bash", "bash"),
    summary(),
    work("bash", SUMMARISED),
)
OPENCODE_TOO_LONG = (TITLE, work("bash"), *OPENCODE_LONG[2:])
OPENCODES = [name for name in INSTALLED if name.startswith("opencode")]
NATIVES = [name for name in INSTALLED if name.startswith("native")]
SPAWN, WAIT = scripts.CODEXS_HELPER, scripts.CODEXS_WAIT
REWORDED = (
    Conversation("main", ("shell, shell",), after="shell"),
    Conversation("main", (scripts.FINAL,), after="shell, shell"),
)
"""smolagents words its turns again, so each of its calls begins with other tokens."""
LIVE = [
    case("mini-swe-agent", scripts.CHECKED, checked("bash", last="bash")),
    *(case(name, scripts.CHECKED, TITLE, checked("bash")) for name in OPENCODES),
    case("codex", scripts.CHECKED, checked("exec_command")),
    case("claude-code", scripts.CHECKED, checked("Bash")),
    case("qwen-code", scripts.CHECKED, checked("run_shell_command")),
    case("gemini-cli", scripts.CHECKED, checked("run_shell_command")),
    *(case(name, scripts.CHECKED, checked("shell")) for name in NATIVES),
    case("aider", scripts.CHECKED, work(EDIT), TITLE),  # what it gets as a title is its commit message
    case("cline", scripts.CHECKED, checked("run_commands")),
    case("kilo", scripts.CHECKED, checked("bash")),
    case("pi", scripts.CHECKED, checked("bash")),
    case("claude-agent-sdk", scripts.CHECKED, checked("Bash")),
    case("deepagents", scripts.CHECKED, checked("execute")),
    case("openai-agents", scripts.CHECKED, checked("shell")),
    case("pydantic-ai", scripts.CHECKED, checked("shell")),
    case("smolagents", scripts.CHECKED, work("shell"), *REWORDED),
    *(case(name, scripts.SHARED, *OPENCODE_SHARED, long=True) for name in OPENCODES),
    case(
        "codex",
        scripts.SHARED,
        work(f"{SPAWN}, {SPAWN}", WAIT, WAIT, "exec_command", "Done with helpers."),
        *halves("exec_command"),
    ),
    *(case(name, scripts.LONG, *OPENCODE_LONG, long=True) for name in OPENCODES),
    *(case(name, scripts.TOO_LONG, *OPENCODE_TOO_LONG, long=True) for name in OPENCODES),
    case(
        "codex",
        scripts.LONG,
        work("exec_command", "exec_command", "exec_command"),
        summary(after="exec_command"),
        work("exec_command", SUMMARISED),
    ),
]


WORDS = {
    "id": "words",
    "instruction": scripts.TOLD,
    "files": {"words.py": (HERE / "native" / "mcp_server.py").read_text()},
    "mcp": [{"name": "words", "command": ["python3", "words.py"], "env": {"WORD": "quince"}}],
    "verifier": {"command": 'test "$(cat hello.txt)" = quince', "timeout": 30},
    "timeout": 240,
}
"""A task whose MCP server alone knows what is to be written."""
SLOW_SECONDS = 12
"""How long a slow MCP server takes to its first answer, as on a machine under load."""
WITH_MCP = [name for name in sorted(INSTALLED) if INSTALLED[name].mcp]

SERVERS = (
    McpServer(name="count", command=("python3", "count.py"), env={"FROM": "1"}),
    McpServer(name="words", url="http://words:80/mcp"),
)
ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "bf-key", "model", 4096)


def need_agent(name: str) -> None:
    package = INSTALLED[name].package
    if name in NATIVES and package.installed_version() != package.version:
        INSTALLED[name].install()  # a copy of files of this project
    need(f"{name} {package.version} (harness agents install {name})", package.installed_version() == package.version)


@pytest.fixture(scope="module")
def table() -> Iterator[list[Line]]:
    """Takes a line of each live run, and writes them where it is asked."""
    lines: list[Line] = []
    yield lines
    if TABLE in os.environ:
        write_table(Path(os.environ[TABLE]), lines)


@pytest.mark.parametrize(("name", "instruction", "expected"), LIVE)
def test_an_unmodified_agent_finishes_its_task_and_leaves_this_tree(
    name: str, instruction: str, expected: list[Conversation], *, proxy: RunningProxy, tmp_path: Path, table: list[Line]
) -> None:
    need_agent(name)
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"instruction": instruction, "timeout": 240})
    where = ["--run-dir", str(tmp_path / "run"), "--name", tmp_path.name, "--proxy", proxy.url]
    assert main(["run", str(tasks), "--agent", name, "--sandbox", "process", *where]) == 0
    (row,) = results(tmp_path / "run")
    assert (row["reward"], row["failure"], row["attempts"]) == (1.0, None, 1), row
    assert row["trainable"] == row["completions"]
    pool = open_pool(proxy.pool)
    (rollout,) = finished_rollouts(pool, find_run(pool, tmp_path.name).id)
    conversations = tree(rollout.completions)
    assert conversations == expected
    version = INSTALLED[name].package.version
    table.append(Line(name, version, instruction, row["seconds"], row["completions"], tuple(conversations)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["claude-agent-sdk", "deepagents", "openai-agents", "pydantic-ai"])
def test_a_tool_that_nobody_has_offered_does_not_end_an_agent_of_an_sdk(
    name: str, proxy: RunningProxy, tmp_path: Path
) -> None:
    """smolagents is left out: it goes on, but shows its model an error without the call, so the script repeats it."""
    need_agent(name)
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO | {"instruction": scripts.MISTAKEN, "timeout": 240})
    where = ["--run-dir", str(tmp_path / "run"), "--name", tmp_path.name, "--proxy", proxy.url]
    assert main(["run", str(tasks), "--agent", name, "--sandbox", "process", *where]) == 0
    (row,) = results(tmp_path / "run")
    assert (row["reward"], row["failure"], row["attempts"], row["completions"]) == (1.0, None, 1, 4), row


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningProxy]:
    """As `proxy`, with more context."""
    make_tiny_model(model := tmp_path_factory.mktemp("models") / "model", seed=0, sizes=ROOMY)
    directory = RunDir(tmp_path_factory.mktemp("service"))
    options = ProxyOptions(model=model, script=f"{HERE / 'scripts.py'}:hello")
    with directory.locked(), service(options, directory) as running:
        yield running


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_MCP)
def test_the_tools_of_a_tasks_mcp_server_reach_the_model(name: str, roomy: RunningProxy, tmp_path: Path) -> None:
    need_agent(name)
    tasks = write_tasks(tmp_path / "tasks.jsonl", WORDS)
    where = ["--run-dir", str(tmp_path / "run"), "--name", tmp_path.name, "--proxy", roomy.url]
    assert main(["run", str(tasks), "--agent", name, "--sandbox", "process", *where]) == 0
    (row,) = results(tmp_path / "run")
    assert (row["reward"], row["failure"], row["attempts"]) == (1.0, None, 1), row
    assert row["trainable"] == row["completions"]


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_MCP)
def test_an_agent_waits_for_the_tools_of_a_slow_mcp_server(name: str, roomy: RunningProxy, tmp_path: Path) -> None:
    """Its first call has them: without them no policy can solve the task, and the verdict would be the machine's."""
    need_agent(name)
    server = (HERE / "native" / "mcp_server.py").read_text()
    late = f"import time\n\ntime.sleep({SLOW_SECONDS})\n{server}"
    tasks = write_tasks(tmp_path / "tasks.jsonl", WORDS | {"files": {"words.py": late}})
    where = ["--run-dir", str(tmp_path / "run"), "--name", tmp_path.name, "--proxy", roomy.url]
    assert main(["run", str(tasks), "--agent", name, "--sandbox", "process", *where]) == 0
    (row,) = results(tmp_path / "run")
    assert (row["reward"], row["failure"], row["attempts"]) == (1.0, None, 1), row


@pytest.fixture(scope="module")
def address_of_words() -> Iterator[str]:
    """The address of an MCP server that is made with the SDK of MCP, which smolagents brings."""
    need_agent("smolagents")
    environment = {"PYTHONPATH": str(INSTALLED["smolagents"].package.directory / PACKAGES), "WORD": "quince"}
    command = [sys.executable, "-S", str(HERE / "words_server.py")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process:
        yield process.stdout.readline().strip()
        process.kill()


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in WITH_MCP if "http" in INSTALLED[name].mcp])
def test_the_tools_of_an_mcp_server_over_http_reach_the_model(
    name: str, roomy: RunningProxy, address_of_words: str, tmp_path: Path
) -> None:
    need_agent(name)
    task = WORDS | {"files": {}, "mcp": [{"name": "words", "url": address_of_words}]}
    where = ["--run-dir", str(tmp_path / "run"), "--name", tmp_path.name, "--proxy", roomy.url]
    tasks = write_tasks(tmp_path / "tasks.jsonl", task)
    assert main(["run", str(tasks), "--agent", name, "--sandbox", "process", *where]) == 0
    (row,) = results(tmp_path / "run")
    assert (row["reward"], row["failure"], row["attempts"]) == (1.0, None, 1), row


def test_the_shell_agent_tells_the_model_no_more_than_the_task(run: Callable[..., list[dict[str, Any]]]) -> None:
    (row,) = run()
    assert (row["reward"], row["completions"], row["attempts"]) == (1.0, 2, 1)


@pytest.mark.parametrize("name", AGENTS)
def test_an_instruction_that_looks_like_an_option_stays_an_argument(name: str) -> None:
    need_agent(name)
    launch = INSTALLED[name].launch(ENDPOINT, bundle_at("/agents", name), ())
    argument, input = '"$INSTRUCTION"' in launch.command, '< "$INSTRUCTION_FILE"' in launch.command
    assert argument != input and "bf-key" not in str(launch)


COMMON = {"claude-code": '--mcp-config "$MCP_FILE"', "native": '--mcp "$MCP_FILE"'}
COMMON |= dict.fromkeys((agent.name for agent in SDK_AGENTS), COMMON["native"])
"""Agents that read the file which MCP_FILE names, and how they are told."""


@pytest.mark.parametrize("name", WITH_MCP)
def test_an_agent_is_started_with_a_tasks_mcp_servers(name: str) -> None:
    """Programs and addresses stand in the file or on the command line that the agent reads them from."""
    plain = INSTALLED[name].launch(ENDPOINT, bundle_at("/agents", name), ())
    servers = [server for server in SERVERS if server.spoken in INSTALLED[name].mcp]
    told = INSTALLED[name].launch(ENDPOINT, bundle_at("/agents", name), servers)
    if option := COMMON.get("native" if name.startswith("native") else name):  # it reads the common form
        assert option in told.command and option not in plain.command
    else:
        words = "".join(told.files.values())
        assert "count.py" in words and "http://words:80/mcp" in words
    assert "count.py" not in str(plain) and "MCP_FILE" not in plain.command


def test_codex_reads_any_text_of_a_server() -> None:
    """TOML has no surrogate pairs, and takes no control character as it is, also not the one that JSON takes."""
    need_agent("codex")
    odd = '\U0001f980 \u00e9 \x7f \x01 \n " \\'
    server = McpServer(name="odd", command=("sh", "-c", odd), env={"ODD": odd})
    launch = INSTALLED["codex"].launch(ENDPOINT, bundle_at("/agents", "codex"), (server,))
    told = tomllib.loads(launch.files["~/.codex/config.toml"])["mcp_servers"]["odd"]
    assert (told["args"], told["env"]) == (["-c", odd], {"ODD": odd})


def test_the_common_form_has_programs_and_addresses() -> None:
    words = file_text(SERVERS)
    assert "count.py" in words and "http://words:80/mcp" in words


def test_a_task_with_mcp_servers_needs_an_agent_with_mcp(run: Callable[..., list[dict[str, Any]]]) -> None:
    program, address = (Task(id=server.name, mcp=(server,)) for server in SERVERS)
    for name, refused in (("aider", program), ("mini-swe-agent", address)):
        scaffold = Scaffold(name=name, agent=INSTALLED[name])
        check_servers([scaffold], [Task(id="u")])
        spare, said = (
            replace(scaffold, weight=0),
            f"'{refused.id}' has an MCP server over .*'{name}' cannot use; leave out",
        )
        check_servers([spare], [refused])
        with pytest.raises(UserError, match=said):
            check_servers([scaffold], [refused])
        with pytest.raises(UserError, match=said):  # it works in evaluations
            check_servers([spare], [Task(id="u")], [refused])
    check_servers([Scaffold(name="native", agent=INSTALLED["native"])], [program])
    words = WORDS | {"instruction": scripts.HELLO, "verifier": {"command": "grep -q words.py found"}}
    (row,) = run(tasks=[words], command=f'cp "$MCP_FILE" found; {SHELL_AGENT}')
    assert row["reward"] == 1.0, row


def test_agents_that_share_a_bundle_install_it_once_after_the_runtime() -> None:
    named = ["opencode-messages", "opencode", "runtime", "codex"]
    assert [package.name for package, _ in bundles_of(named)] == ["runtime", "opencode", "codex"]
    with pytest.raises(UserError, match="the agent 'nobody' cannot be installed; choose from: .*, runtime$"):
        bundles_of(["codex", "nobody"])
