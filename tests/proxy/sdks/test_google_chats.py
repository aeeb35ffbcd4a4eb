"""Streamed chats of google-genai's own clients, in Python and JavaScript: they go on with recorded ids, and throw where
an answer breaks off."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted import Fault, ScriptedReply
from tests.conftest import need
from tests.proxy.conftest import Serve, shell_call
from tests.proxy.sdks import environments

HERE = Path(__file__).parent
PACKAGES = ("genai-of-agents", "@google/genai")
"""The version that agents bring along, and the newest one."""
CLIENTS = ["python", *(pytest.param(name, marks=pytest.mark.long) for name in PACKAGES)]
STEPS = "<think>\nlook first\n</think>\n\nI look.\n" + shell_call("ls") + "\n" + shell_call("pwd")


def script(prompt: str, ids: Any) -> ScriptedReply:
    return ScriptedReply("all is done" if "</tool_response>" in prompt else STEPS)


async def chat(client: str, url: str) -> list[str]:
    """What the client's script prints."""
    if client == "python":
        python = environments.made("google_genai")
        need("google-genai (python -m tests.proxy.sdks.environments google_genai)", python is not None)
        command = [str(python), str(HERE / "google_chat.py"), url]
    else:
        need("npm", shutil.which("npm") is not None)
        packages = await asyncio.to_thread(environments.npm_packages, HERE / "google_js")
        [node] = packages.glob("node_modules/node-linux-*/bin/node")  # Debian's is too old for the newest
        command = [str(node), str(packages / "chat.mjs"), client, url]
    process = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-1)
    printed, problems = await process.communicate()
    assert process.returncode == 0, problems.decode()
    said: list[str] = json.loads(printed.splitlines()[-1])
    return said


@pytest.mark.parametrize("client", CLIENTS)
async def test_each_call_goes_on_from_the_one_before(serve: Serve, client: str) -> None:
    stand = await serve(script)
    said = await chat(client, stand.url)
    assert said == (["I look.all is done", "all is done"] if client == "python" else ["I look.", *["all is done"] * 2])
    rows = stand.recorded()
    assert [row.follows for row in rows] == [None, *(row.id for row in rows[:-1])]
    assert len(rows) == 3 and stand.path(1)[: len(stand.path(0))] == stand.path(0)


@pytest.mark.parametrize("client", CLIENTS)
async def test_an_answer_that_breaks_off_is_an_error(serve: Serve, client: str) -> None:
    stand = await serve(lambda prompt, ids: Fault(text="one two three four", after=3))
    assert await chat(client, stand.url) == ["error 502" if client == "python" else "error"]
    assert [row.finish_reason for row in stand.recorded()] == ["error"]
