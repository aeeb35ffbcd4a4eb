"""SDKs and agent frameworks, unmodified, at a task of two steps through the proxy, before a scripted engine.

Asserted: the task ends with the right answer, no turn begins a conversation that it should continue, and how many of
the calls can train. CI runs google-genai, whose environment is small; the others are long.
"""

import asyncio
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import need
from tests.harness.live import write_section
from tests.proxy.conftest import Serve
from tests.proxy.sdks import environments
from tests.proxy.test_purposes import issued_key

FRAMEWORKS, TASK = Path(__file__).parent / "frameworks", Path(__file__).parent / "task"
MASTRA = Path(__file__).parent / "mastra"
TABLE = "BLACKFORGE_AGENTS_TABLE"
ANSWER = "It is 70 degrees Fahrenheit in Paris."
BESIDE = "I take the next step."
"""Text beside the calls, which some frameworks drop."""
VALUES: dict[str, Any] = {"city": "Paris", "celsius": 21, "fahrenheit": 70}
STEPS: dict[str, dict[str, Any]] = {"weather": {"city": "Paris"}, "convert": {"celsius": 21}}
RECORD = {"city": "Paris", "fahrenheit": 70}
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "OTEL_SDK_DISABLED": "true",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "AGNO_TELEMETRY": "false",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True)
class Expected:
    """What a framework leaves in the pool."""

    calls: int
    chains: int
    """Of calls, each of which begins with the exact tokens of the one before."""
    trained: int
    record: bool = True
    conversations: int | None = None
    """Calls that follow no other. None: as many as chains; fewer where the framework changes its turns."""


CASES = {
    "agno": Expected(4, 2, 4),
    "autogen": Expected(4, 2, 4),
    "crewai": Expected(4, 4, 4, conversations=2),  # it drops the text beside calls
    "dspy": Expected(4, 4, 4, record=False),  # it writes its own prompts, a new one for each step
    "google_genai": Expected(4, 2, 4),
    "instructor": Expected(2, 2, 2),  # it makes text of the first record
    "langchain": Expected(4, 2, 4),
    "llama_index": Expected(4, 2, 4),
    "mastra": Expected(3, 2, 3, record=False, conversations=1),  # it drops a text that it has said before
    "openai_agents": Expected(4, 2, 4),
    "pydantic_ai": Expected(4, 2, 4),
    "pydantic_ai_google": Expected(4, 2, 4),  # it sends User-Agent twice
    "smolagents": Expected(3, 3, 3, record=False, conversations=1),  # it words its turns again
    "smolagents_code": Expected(3, 3, 3, record=False, conversations=1),  # it puts the stop string back
}


def script(prompt: str, ids: Sequence[int]) -> str:
    """Take the two steps, and then answer in the form that is asked for; continue a call that is given in part."""
    text = _reply(prompt)
    if prompt.endswith("<think>"):  # the proxy begins a required call with reasoning
        return f"\nhm\n</think>\n\n{text}"
    given = next((size for size in range(len(text), 0, -1) if prompt.endswith(text[:size])), 0)
    return text[given:] if given or not text.startswith("<tool_call>") else f"{BESIDE}\n{text}"


def _reply(prompt: str) -> str:
    offered = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    tools = (
        {tool["name"]: tool for tool in (json.loads(line)["function"] for line in offered[1].split("\n"))}
        if offered
        else {}
    )
    step = "" if "70 degrees Fahrenheit" in prompt else "convert" if "21 degrees Celsius" in prompt else "weather"
    if "[[ ## next_tool_name ## ]]" in prompt:
        return _fields(
            next_thought="on", next_tool_name=step or "finish", next_tool_args=json.dumps(STEPS.get(step, {}))
        )
    if "[[ ## reasoning ## ]]" in prompt:
        return _fields(reasoning="done", answer=ANSWER)
    if step in tools:
        return _call(step, STEPS[step])
    if "<code>" in prompt:
        code = f"print({step}(**{STEPS[step]}))" if step else f"final_answer({ANSWER!r})"
        return f"Thought: {BESIDE}\n<code>\n{code}\n</code>"
    if step and "Action Input:" in prompt:
        return f"Thought: on\nAction: {step}\nAction Input: {json.dumps(STEPS[step])}"
    for name in tools.keys() - STEPS.keys():
        return _call(name, {key: VALUES.get(key, ANSWER) for key in tools[name]["parameters"]["properties"]})
    if "Make a record" in prompt:
        return json.dumps(RECORD)
    return f"Thought: done\nFinal Answer: {ANSWER}" if "Final Answer:" in prompt else ANSWER


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _fields(**values: str) -> str:
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()) + "\n\n[[ ## completed ## ]]"


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Takes a line of each framework, and writes them where it is asked."""
    lines: list[str] = []
    yield lines
    if TABLE in os.environ:
        write_section(Path(os.environ[TABLE]), "\n".join([HEAD, *sorted(lines), ""]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "google_genai" else pytest.mark.long) for name in CASES]
)
async def test_a_framework_does_its_task(name: str, serve: Serve, tmp_path: Path, table: list[str]) -> None:
    stand = await serve(script, prescribed="prefill")
    key = issued_key(stand, "train")
    answer = await _run(name, stand.url, key, tmp_path)
    assert "70 degrees Fahrenheit" in answer["answer"] and answer.get("record", RECORD) == RECORD
    expected, rows = CASES[name], stand.recorded(key)
    whole = [stand.path(index, key) for index in range(len(rows))]
    ids = {row.id: path for row, path in zip(rows, whole, strict=True)}
    goes_on = [
        row
        for row, path in zip(rows, whole, strict=True)
        if row.follows and path[: len(ids[row.follows])] == ids[row.follows]
    ]
    trained = sum(row.untrainable is None for row in rows)
    assert (
        Expected(len(rows), len(rows) - len(goes_on), trained, "record" in answer, expected.conversations) == expected
    )
    conversations = sum(row.follows is None for row in rows)
    assert conversations == (expected.conversations or expected.chains)
    version = _version(name) + (" (CodeAgent)" if name == "smolagents_code" else "")
    table.append(f"| {version} | {len(rows)} | {conversations} | {expected.chains} | {trained} of {len(rows)} |")


@pytest.mark.long
async def test_a_required_call_and_a_form_are_one_chain(serve: Serve, tmp_path: Path) -> None:
    stand = await serve(script, prescribed="prefill")
    answer = await _run("openai_agents", stand.url, "agent", tmp_path, script="openai_agents_form")
    rows = stand.recorded()
    assert answer["record"] == RECORD and [row.misfit for row in rows] == [""] * 3
    assert [bool(row.given) for row in rows] == [True, False, False]
    whole = [stand.path(index) for index in range(3)]
    assert whole[1][: len(whole[0])] == whole[0] and whole[2][: len(whole[1])] == whole[1]


async def _run(name: str, url: str, key: str, home: Path, script: str = "") -> dict[str, Any]:
    """The JSON that a framework's script prints. `script`: its name, where that is not the framework's."""
    if name == "mastra":
        packages = await asyncio.to_thread(environments.npm_packages, MASTRA)
        [node] = packages.glob("node_modules/node-linux-*/bin/node")  # it needs a newer one than Debian's
        command = [str(node), str(packages / "agent.mjs")]
    else:
        python = environments.made(name) if name == "google_genai" else await asyncio.to_thread(environments.make, name)
        need(f"{name} (python -m tests.proxy.sdks.environments {name})", python is not None)
        # -P: its own folder would hide the packages of the same names
        command = [str(python), "-P", str(FRAMEWORKS / f"{script or name}.py")]
    variables = {"PATH": os.environ["PATH"], "HOME": str(home), "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    variables["PYTHONPATH"] = str(TASK)
    process = await asyncio.create_subprocess_exec(
        *command, cwd=home, env=QUIET | variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, problems = await process.communicate()
    assert process.returncode == 0, problems.decode()
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result


def _version(name: str) -> str:
    """The first line of its requirements: the framework itself."""
    if name == "mastra":
        version: str = json.loads((MASTRA / "package.json").read_text())["dependencies"]["@mastra/core"]
        return f"@mastra/core {version}"
    return (environments.REQUIREMENTS / f"{name}.txt").read_text().split("\n")[0].replace("==", " ")


HEAD = """## SDKs and frameworks

Written by `make agents-table`, too (`tests/proxy/sdks/test_frameworks.py`): a task of two tool calls, and where the
framework has it an answer of a prescribed form. In a chain, each call begins with the exact tokens, prompt and reply,
of the one before. smolagents words its turns again or puts the stop string back, CrewAI drops the text beside calls,
and Mastra a text that it has said before: their conversations go on, and such a call begins a chain. DSPy writes a new
prompt for each step.

| framework | calls | conversations | chains | can train |
| --- | ---: | ---: | ---: | --- |"""
