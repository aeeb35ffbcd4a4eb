"""The agent's tools: a shell session, files by ranges, MCP servers, and calls that make no sense."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.agents.native.files import Files
from harness.agents.native.mcp import Servers
from harness.agents.native.settings import ConnectedServer, SettingsError, read_servers, read_settings
from harness.agents.native.shell import KEPT, Shell
from harness.agents.native.tool import Toolbox, ToolFailed, shortened
from proxy.pool.behaviour.event import Kind
from proxy.pool.behaviour.read import events
from tests.harness.native.conftest import Agent, called, check_trained
from tests.harness.native.http_mcp import PROTOCOL, http_server
from tests.proxy.written import WRITERS
from tests.proxy.zoo import FAMILIES, make_zoo

SERVER = Path(__file__).with_name("mcp_server.py")


@pytest.fixture(scope="module")
def zoo(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one for each model family."""
    make_zoo(tiny_model, root := tmp_path_factory.mktemp("zoo"))
    return root


@pytest.mark.parametrize("family", ["Qwen3-Coder", "Llama-3.1", "DeepSeek-V3.1"])
async def test_the_agent_works_with_the_calls_of_other_models(family: str, zoo: Path, agent: Agent) -> None:
    """Of a shell, a file and a context action, each written as the family writes it."""
    write = WRITERS[FAMILIES[family].way][1]
    replies = [
        write([("shell", {"command": "word=quince; echo $word"})]),
        write([("edit_file", {"path": "note.txt", "first": 1, "last": 0, "new_text": "the word is quince"})]),
        write([("compact", {"notes": "The word stands in note.txt."})]),
        "Done.",
    ]
    session = await agent(*replies, family=zoo / family)
    assert session.status == 0 and session.output.endswith("Done.\n"), session.output
    assert (agent.directory / "note.txt").read_text() == "the word is quince\n"
    assert (
        "quince" in session.model.prompts[1].split("echo $word")[1] and "<tool_call>\n{" not in session.model.prompts[1]
    )
    assert "The word stands in note.txt." in session.model.prompts[3] and "echo $word" not in session.model.prompts[3]
    assert session.labels == ["main"] * 4 and session.dropped() == [("compact", ["r1", "r2", "r3"])]
    assert session.goes_on(1) and session.goes_on(2) and not session.goes_on(3)
    check_trained(session.calls)


@pytest.fixture(params=["/bin/bash", "/bin/sh"])
def shell(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("SHELL", request.param)
    monkeypatch.chdir(tmp_path)
    with Shell(20) as shell:
        yield shell


def test_a_session_keeps_directory_variables_and_functions(shell: Shell, tmp_path: Path) -> None:
    shell.run("mkdir sub; cd sub; word='a b'; say() { echo \"$word\"; }")
    assert shell.run("say; pwd") == f"a b\n{tmp_path}/sub" and shell.directory == tmp_path / "sub"
    assert shell.run("printf no-newline") == "no-newline" and shell.run("true") == ""
    assert shell.run("echo out; false") == "out\n[exit code: 1]" and shell.run("(exit 7)") == "[exit code: 7]"
    assert shell.run("cat; read line; echo \"'$line'\"") == "''"


def test_a_wrong_command_says_so_and_an_end_of_the_shell_is_told(shell: Shell, tmp_path: Path) -> None:
    assert "yntax error" in shell.run("if then") or "nterminated" in shell.run("if then")
    assert "a new shell starts" in shell.run("cd /; exit 3")
    assert shell.run("pwd") == str(tmp_path)
    assert "a new shell starts" in shell.run("sleep 600 & exit 0")
    with pytest.raises(ToolFailed, match="zero byte"):
        shell.run("echo \0")


def test_a_command_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    with Shell(2) as shell:  # a busy machine takes a while to start one
        began = time.monotonic()
        said = shell.run(f"echo begun; (sleep 4; touch {tmp_path}/late) & sleep 600")
        assert time.monotonic() - began < 300
        assert said.startswith("begun") and "the command timed out after 2 seconds" in said
        assert shell.run("echo again") == "again"
        time.sleep(max(0.0, began + 5 - time.monotonic()))
        assert not (tmp_path / "late").exists()


def test_output_without_end_is_cut_in_the_middle(shell: Shell) -> None:
    said = shell.run("seq 1 200000")
    assert said.startswith("1\n2\n") and said.endswith("199999\n200000") and "bytes left out" in said
    assert len(said) < 3 * KEPT


def test_files_are_read_and_edited_by_lines(tmp_path: Path) -> None:
    files = Files(lambda: tmp_path)
    assert files.edit("a/new.txt", 1, 0, "one\ntwo\nthree\n") == "a/new.txt has 3 lines now"
    assert files.read("a/new.txt", 2) == "2\ttwo\n3\tthree\n[lines 2 to 3 of 3]"
    files.edit("a/new.txt", 2, 2, "zwei\nund mehr")
    files.edit("a/new.txt", 1, 1, "")
    assert (tmp_path / "a/new.txt").read_text() == "zwei\nund mehr\nthree\n"
    files.edit("a/new.txt", 4, 3, "end")
    assert files.read("a/new.txt", 1, 1) == "1\tzwei\n[lines 1 to 1 of 4]"
    (tmp_path / "windows.txt").write_bytes(b"a\r\nb")
    files.edit("windows.txt", 2, 2, "c")
    assert (tmp_path / "windows.txt").read_bytes() == b"a\r\nc\n"


@pytest.mark.parametrize(
    ("path", "first", "last"),
    [("none", 1, 1), ("bytes", 1, 1), ("two", 4, 4), ("two", 0, 1), ("two", 2, 3), (".", 1, 0)],
)
def test_edits_that_make_no_sense_change_nothing(path: str, first: int, last: int, tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "two").write_text("one\ntwo\n")
    with pytest.raises(ToolFailed):
        Files(lambda: tmp_path).edit(path, first, last, "x")
    assert (tmp_path / "two").read_text() == "one\ntwo\n" and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("{", "not JSON"),
        ("[]", "must be an object"),
        ('{"first": 1}', "path is missing"),
        ('{"path": 1}', "must be of type string"),
        ('{"path": "a", "first": true}', "must be of type integer"),
        ('{"path": "a", "lines": 3}', "must be an object with: path, first, last"),
    ],
)
def test_calls_that_make_no_sense_are_told_so(arguments: str, why: str, tmp_path: Path) -> None:
    tools = Toolbox(Files(lambda: tmp_path).tools(), 1000)
    assert why in tools.run({"function": {"name": "read_file", "arguments": arguments}})
    assert "there is no tool x" in tools.run({"function": {"name": "x", "arguments": "{}"}})
    assert shortened("abcdef", 4) == "ab\n[... 2 characters left out ...]\nef"


async def test_tools_of_an_mcp_server_reach_the_model(agent: Agent) -> None:
    server = {"command": [sys.executable, str(SERVER)], "env": {"WORD": "apple"}}
    replies = [
        called("words__join", text="red"),
        called("words__fail", text=""),
        called("words__die", text=""),
        "Done.",
    ]
    session = await agent(*replies, mcp={"words": server}, tools=["words__join", "words__fail", "words__die"])
    assert session.status == 0, session.output
    assert '"name": "words__join"' in session.model.prompts[0] and '"name": "shell"' not in session.model.prompts[0]
    assert "red apple {} -32601\n[image]" in session.model.prompts[1]
    assert "Error: it does not work" in session.model.prompts[2]
    assert "Error: no answer to tools/call" in session.model.prompts[3]


async def test_tools_of_an_mcp_server_over_http_reach_the_model(agent: Agent) -> None:
    texts = ("red", "broken", "lost", "blue")
    async with http_server() as server:
        replies = [*(called("words__join", text=text) for text in texts), "Done."]
        session = await agent(*replies, mcp={"words": {"url": server.url}}, tools=["words__join"])
    assert session.status == 0, session.output
    assert "red quince {}" in session.model.prompts[1] and "blue quince {}" in session.model.prompts[4]
    assert "Error: no answer to tools/call" in session.model.prompts[2]
    assert "Error: the server answers with HTTP 404: no such session" in session.model.prompts[3]
    assert server.ended == ["s1"] and "MCP-Protocol-Version" not in server.headers[0]
    assert {(each["Mcp-Session-Id"], each["MCP-Protocol-Version"]) for each in server.headers[1:]} == {("s1", PROTOCOL)}


def test_servers_of_a_file_in_the_common_form_are_read(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    program = '"a": {"type": "stdio", "command": "x", "args": ["y"], "env": {"Z": "1"}}'
    file.write_text(f'{{"mcpServers": {{{program}, "b": {{"type": "http", "url": "http://m"}}}}}}')
    known = {"a": ConnectedServer(command=("x", "y"), env={"Z": "1"}), "b": ConnectedServer(url="http://m")}
    assert read_servers(file) == known
    file.write_text("[]")
    with pytest.raises(SettingsError, match="cannot be read"):
        read_servers(file)


def test_a_server_that_does_not_start_is_named() -> None:
    commands = (("no-such-program",), (sys.executable, "-c", "print('hello')"), (sys.executable, "-c", ""))
    nobody = ConnectedServer(url="http://127.0.0.1:1/mcp")
    for server in (*(ConnectedServer(command=command) for command in commands), nobody):
        with Servers() as servers, pytest.raises(SettingsError, match=r"the MCP server a does not start .*mcp\.a"):
            servers.start({"a": server})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "cannot be read as JSON"),
        ("[]", "no object"),
        ('{"polcy": "free"}', "an unknown key, 'polcy'"),
        ('{"threshold": [0.8, 0.5]}', "lowest, highest"),
        ('{"threshold": [0, 1]}', "lowest, highest"),
        ('{"keep_last": 0}', "at least 1"),
        ('{"drafts": true}', "at least 1"),
        ('{"command_seconds": 0}', "above 0"),
        ('{"tools": "shell"}', "a list of texts"),
        ('{"mcp": {"a": {"command": "x"}}}', "a list of texts"),
        ('{"mcp": {"a": {"program": ["x"]}}}', 'like {"command"'),
        ('{"mcp": {"a": {"url": ""}}}', "a text"),
    ],
)
def test_settings_that_make_no_sense_are_named(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text(text)
    with pytest.raises(SettingsError) as error:
        read_settings(file, must_exist=True)
    assert why in str(error.value)


async def test_wrong_settings_end_the_agent_before_any_call(agent: Agent) -> None:
    for settings in ({"keep_last": 0}, {"tools": ["shel"]}):
        session = await agent(**settings)
        assert session.status == 2 and session.model.prompts == [] and session.output.startswith("error: the setting")


async def test_the_pool_reads_failed_calls_from_the_results(agent: Agent) -> None:
    """The forms of exit codes, refusals and time-outs are those that events are read from (docs/behaviour.md)."""
    commands = [called("shell", command=command) for command in ("(exit 3)", "sleep 600")]
    session = await agent(*commands, called("edit_file", path="x"), called("nothing"), "Done.", command_seconds=2)
    failed = [event.quote.split(":")[0] for event in events(session.calls) if event.kind == Kind.TOOL_FAILED]
    assert failed == ["exit code 3", "time-out", "refused", "refused"]
