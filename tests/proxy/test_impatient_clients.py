"""Real clients with a short read timeout get answers that take longer and are not streamed, and they train."""

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from proxy.engine.scripted import ScriptedReply
from tests.conftest import need
from tests.proxy.conftest import Serve, Stand
from tests.proxy.sdks import environments
from tests.proxy.test_ongoing import until

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
HERE = Path(__file__).parent
WORDS = "one two three four five six"
SLOW = ScriptedReply(WORDS, seconds_per_token=0.25)
"""Takes over two seconds."""
Ask = Callable[[str, float, int], Awaitable[Any]]
"""Address, seconds of the read timeout, how often the client repeats."""


async def by_openai(url: str, seconds: float, repeats: int) -> Any:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="agent", timeout=seconds, max_retries=repeats
    ) as client:
        answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
        return answer.choices[0].message.content


async def by_responses(url: str, seconds: float, repeats: int) -> Any:
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="agent", timeout=seconds, max_retries=repeats
    ) as client:
        return (await client.responses.create(model="m", input="hi")).output_text


async def by_anthropic(url: str, seconds: float, repeats: int) -> Any:
    async with anthropic.AsyncAnthropic(base_url=url, api_key="agent", timeout=seconds, max_retries=repeats) as client:
        answer: Any = await client.messages.create(
            model="m", max_tokens=500, messages=[{"role": "user", "content": "hi"}]
        )
        return answer.content[0].text


async def by_litellm(url: str, seconds: float, repeats: int) -> Any:
    litellm = pytest.importorskip("litellm")
    answer = await litellm.acompletion(
        model="openai/m", api_base=f"{url}/v1", api_key="agent", messages=[{"role": "user", "content": "hi"}],
        timeout=seconds, max_retries=repeats,
    )  # fmt: skip
    return answer.choices[0].message.content


async def by_google_genai(url: str, seconds: float, repeats: int) -> str:
    python = await asyncio.to_thread(environments.make, "google_genai")
    return await printed(python, HERE / "sdks" / "google_waits.py", url, seconds, repeats)


async def by_node_fetch(url: str, seconds: float, repeats: int) -> str:
    return await by_node("fetch", url, seconds, repeats)


async def by_node_http(url: str, seconds: float, repeats: int) -> str:
    return await by_node("http", url, seconds, repeats)


async def by_node(client: str, url: str, seconds: float, repeats: int) -> str:
    need("node", shutil.which("node") is not None)
    return await printed("node", HERE / "node_waits.mjs", url, client, seconds, repeats)


async def printed(*words: object) -> str:
    process = await asyncio.create_subprocess_exec(*map(str, words), stdout=-1, stderr=-1)
    output, errors = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, errors.decode()
    return output.decode().rstrip("\n")


LONG = (by_responses, by_anthropic, by_litellm, by_google_genai, by_node_fetch, by_node_http)
OTHERS = [pytest.param(ask, marks=pytest.mark.long) for ask in LONG]


def one_row_that_trains(stand: Stand) -> bool:
    return [row.untrainable for row in stand.recorded()] == [None]


@pytest.mark.parametrize("ask", [by_openai, *OTHERS])
async def test_white_space_holds_a_client_that_does_not_repeat(serve: Serve, ask: Ask) -> None:
    stand = await serve(lambda prompt, ids: SLOW, limits={"keepalive_seconds": 0.1})
    assert await ask(stand.url, 2, 0) == WORDS
    assert one_row_that_trains(stand)


@pytest.mark.parametrize("ask", [by_openai, *OTHERS])
async def test_a_client_that_repeats_gets_the_answer_to_its_first_request(serve: Serve, ask: Ask) -> None:
    stand = await serve(lambda prompt, ids: SLOW)
    assert await ask(stand.url, 1, 60) == WORDS
    async with asyncio.timeout(60):
        await until(lambda: one_row_that_trains(stand))
    assert stand.engine is not None and stand.engine.calls == 1
