"""litellm's route `gemini/`, as it is: it asks the Gemini dialect, and sends much of it in snake case."""

from importlib.util import find_spec
from typing import Any

import pytest

from tests.conftest import need
from tests.proxy.conftest import SHELL, Serve, Stand, shell_call, user

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning")  # litellm's own
THOUGHT = "<think>\nlook first\n</think>\n\nI look.\n" + shell_call("ls")


def script(prompt: str, ids: Any) -> str:
    return "done" if "<tool_response>" in prompt else THOUGHT


async def ask(stand: Stand, messages: list[Any], **fields: Any) -> Any:
    """litellm's answer, put together from its chunks where it is streamed."""
    need("litellm (pip install blackforge[providers])", find_spec("litellm") is not None)
    import litellm

    fields = {"tools": [SHELL], **fields}
    where = {"model": "gemini/gemini-2.5-flash", "api_base": f"{stand.url}/v1beta", "api_key": "agent"}
    answer = await litellm.acompletion(**where, messages=messages, num_retries=0, **fields)
    if not fields.get("stream"):
        return answer.choices[0].message
    whole: Any = litellm.stream_chunk_builder([chunk async for chunk in answer])
    return whole.choices[0].message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_task_of_two_steps_continues_with_recorded_ids(serve: Serve, stream: bool) -> None:
    stand = await serve(script)
    turn = await ask(stand, [user("list")], stream=stream)
    (call,) = turn.tool_calls
    assert (turn.content, call.function.name, call.function.arguments) == ("I look.", "shell", '{"command": "ls"}')
    result = {"role": "tool", "tool_call_id": call.id, "content": "file"}
    assert (await ask(stand, [user("list"), turn.model_dump(), result], stream=stream)).content == "done"
    first, second = stand.recorded()
    assert second.follows == first.id and stand.path(1)[: len(stand.path(0))] == stand.path(0)
    assert [row.untrainable for row in (first, second)] == [None, None]


async def test_reasoning_and_its_limits(serve: Serve) -> None:
    stand = await serve(script)
    assert (await ask(stand, [user("list")], reasoning_effort="low")).reasoning_content == "look first"
    await ask(stand, [user("hi")], max_tokens=3, stop=["END"], top_p=0.5)
    assert len(stand.recorded()[1].sampled) == 3


async def test_the_choice_of_tools(serve: Serve) -> None:
    stand = await serve(script)
    assert (await ask(stand, [user("list")], tool_choice="none")).tool_calls is None
