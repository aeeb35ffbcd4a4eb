"""The Vercel AI SDK with its default OpenAI model, from its calls to the rows that are trained.

It answers tool calls with references to stored items, so nothing works without them. Its packages are installed once,
at the versions of tests/proxy/ai_sdk/package-lock.json, into a directory of the user's cache.
"""

import asyncio
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from proxy.prompt.template import ChatTemplate
from tests.conftest import need
from tests.proxy.conftest import Serve, Stand
from tests.proxy.sdks import environments
from trainer.data.assemble import merge, why_not_trainable

HERE = Path(__file__).parent / "ai_sdk"
ID = 1234567890123456789
"""JavaScript prints 1234567890123456800 for it."""


def call(command: str) -> str:
    return f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "{command}", "id": {ID}}}}}\n</tool_call>'


ANSWERS = {
    "</tool_response>": "<think>\nit ran\n</think>\n\nAgain.\n" + call("pwd"),
    "ran pwd": "<think>\nthat is all\n</think>\n\ndone",
    "and now?": "<think>\nnothing is left\n</think>\n\nnothing",
}


def script(prompt: str, ids: Any) -> str:
    """Two steps with calls and reasoning, then text."""
    last = prompt[prompt.rindex("<|im_start|>user") :]
    return next((text for mark, text in reversed(ANSWERS.items()) if mark in last), f"I look.\n{call('ls')}")


@pytest.fixture(scope="session")
def ai_sdk() -> Path:
    """The directory with the SDK and the script; installed by the first test that needs it."""
    need("node and npm", shutil.which("node") is not None and shutil.which("npm") is not None)
    return environments.npm_packages(HERE)


async def run_steps(directory: Path, stand: Stand, mode: str) -> dict[str, Any]:
    """What the script prints."""
    words = ["node", "steps.mjs", stand.url, "agent", mode]
    process = await asyncio.create_subprocess_exec(*words, cwd=directory, stdout=-1, stderr=-1)
    output, errors = await asyncio.wait_for(process.communicate(), 300)
    assert process.returncode == 0, errors.decode()
    printed: dict[str, Any] = json.loads(output)
    return printed


@pytest.mark.parametrize(
    "mode", ["streamed", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("whole", "previous", "echoed"))]
)
async def test_a_tool_loop_is_one_tree_whose_tokens_are_all_trained(
    serve: Serve, template: ChatTemplate, ai_sdk: Path, mode: str
) -> None:
    stand = await serve(script)
    printed = await run_steps(ai_sdk, stand, mode)
    assert printed["texts"] == ["done", "nothing"]
    assert any("item_reference" in kinds for kinds in printed["kinds"][1:]) == (mode != "echoed")
    if mode == "echoed":  # without stored items, the calls come back as JavaScript reads them
        assert {str(json.loads(arguments)["id"]) for arguments in printed["echoed"]} == {"1234567890123456800"}
    calls = stand.recorded()
    assert [call.follows for call in calls] == [None, *(call.id for call in calls[:3])]
    for index in (1, 2):  # a question behind them makes the template leave out their reasoning
        before = stand.path(index - 1)
        assert stand.path(index)[: len(before)] == before
    excluded: Counter[Any] = Counter()
    rows = merge(calls, 1.0, excluded, why_not_trainable)
    assert not excluded and sum(int(row.trained.sum()) for row in rows) == sum(len(call.sampled) for call in calls)
    assert [template.decode(call.sampled) for call in calls] == [
        f"{text}<|im_end|>" for text in (script("<|im_start|>user", ()), *ANSWERS.values())
    ]
