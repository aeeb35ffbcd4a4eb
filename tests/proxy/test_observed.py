"""What the gateway keeps of requests, in every dialect: ends of results, flags, and how calls fit their tools."""

from typing import Any

from proxy.engine.scripted import ScriptedReply
from proxy.pool.behaviour.read import events
from proxy.pool.completions.observed import (
    HEAD,
    MOST_TEXT,
    TAIL,
    UNKNOWN_TOOL,
    Observed,
    ToolResult,
    cut,
    pack,
    unpack,
)
from tests.proxy.conftest import SHELL, Serve, Stand

LONG = "é" + "x" * 5000 + "the end"
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
GOOD = CALL.format("shell", '{"command": "ls"}')
BAD = CALL.format("shell", '{"cmd": 1}') + "\n" + CALL.format("nothing", "{}")
PARAMETERS = SHELL["function"]["parameters"]  # type: ignore[index]


async def test_each_dialect_leaves_the_same(serve: Serve) -> None:
    """One turn with calls that do not fit, and their results: one flagged where the dialect can, one long."""
    stand = await serve(lambda prompt, ids: ScriptedReply("done" if "the end" in prompt else BAD))
    for ask in (_chat, _responses, _anthropic, _gemini):
        before = len(stand.recorded())
        flagged = await ask(stand)
        first, second = stand.recorded()[before:]
        assert first.observed is not None and second.observed is not None
        assert first.observed.faults == ("the call lacks 'command'", UNKNOWN_TOOL) and first.observed.results == ()
        assert second.follows == first.id and second.observed.faults == ()
        one, two = second.observed.results
        ids = [call["id"] for call in first.reply["tool_calls"]]
        assert [one.call, two.call] == ids
        assert (one.error, two.error) == (flagged, False)
        assert (two.head, two.tail, two.size) == (LONG[:HEAD], LONG[-TAIL:], len(LONG))
        kinds = [event.kind for event in events(stand.recorded()[before:]) if event.call == 0]
        assert kinds == ["tool_called", "malformed_call", "tool_failed"]


async def _chat(stand: Stand) -> bool:
    start = {"role": "user", "content": "chat"}
    answer = await stand.chat(start, tools=[SHELL])
    message = answer["choices"][0]["message"]
    texts = zip(message["tool_calls"], ("Error: no command", LONG), strict=True)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in texts]
    await stand.chat(start, message, *results, tools=[SHELL])
    return False


async def _responses(stand: Stand) -> bool:
    tools = [{"type": "function", "name": "shell", "parameters": PARAMETERS}]
    start: list[dict[str, Any]] = [{"role": "user", "content": "responses"}]
    answer = await stand.ask("/v1/responses", {"model": "m", "input": start, "tools": tools, "store": False})
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    texts = zip(calls, ("unsupported call: shell", LONG), strict=True)
    results = [{"type": "function_call_output", "call_id": c["call_id"], "output": text} for c, text in texts]
    items = [*start, *answer["output"], *results]
    await stand.ask("/v1/responses", {"model": "m", "input": items, "tools": tools, "store": False})
    return False


async def _anthropic(stand: Stand) -> bool:
    tools = [{"name": "shell", "input_schema": PARAMETERS}]
    start: list[dict[str, Any]] = [{"role": "user", "content": "anthropic"}]
    body = {"model": "m", "max_tokens": 1000, "tools": tools}
    answer = await stand.ask("/v1/messages", body | {"messages": start})
    calls = [block for block in answer["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": "no command", "is_error": True},
        {"type": "tool_result", "tool_use_id": calls[1]["id"], "content": LONG},
    ]
    turn = {"role": "assistant", "content": answer["content"]}
    await stand.ask("/v1/messages", body | {"messages": [*start, turn, {"role": "user", "content": results}]})
    return True


async def _gemini(stand: Stand) -> bool:
    body = {"tools": [{"functionDeclarations": [{"name": "shell", "parametersJsonSchema": PARAMETERS}]}]}
    start: list[dict[str, Any]] = [{"role": "user", "parts": [{"text": "gemini"}]}]
    path = "/v1beta/models/m:generateContent"
    answer = await stand.ask(path, body | {"contents": start})
    turn = answer["candidates"][0]["content"]
    calls = [part["functionCall"] for part in turn["parts"] if "functionCall" in part]
    shown = ({"error": "no command"}, {"output": LONG})
    parts = [
        {"functionResponse": {"id": call.get("id"), "name": call["name"], "response": response}}
        for call, response in zip(calls, shown, strict=True)
    ]
    await stand.ask(path, body | {"contents": [*start, turn, {"role": "user", "parts": parts}]})
    return False


async def test_text_completions_leave_nothing_and_scripts_are_kept(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: ScriptedReply("ok"))
    await stand.ask("/v1/completions", {"model": "m", "prompt": "once", "max_tokens": 4})
    await stand.chat(
        {"role": "system", "content": "Работай."}, {"role": "user", "content": "修复错误 now"}, tools=[SHELL]
    )
    text, chat = stand.recorded()
    assert text.observed is None
    assert chat.observed is not None and chat.observed.scripts == ("cyrillic", "han") and chat.observed.results == ()


async def test_words_of_a_reply_are_kept_that_no_task_and_no_result_shows(serve: Serve) -> None:
    said = "文件内容：错误信息。我先看一下这个文件内容"
    stand = await serve(lambda prompt, ids: ScriptedReply(said))
    user = {"role": "user", "content": "Mend it."}
    result = {"role": "tool", "tool_call_id": "c", "content": "文件内容：错误信息"}
    call = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": "{}"}}
    await stand.chat(user, {"role": "assistant", "content": "", "tool_calls": [call]}, result, tools=[SHELL])
    await stand.chat({"role": "user", "content": "修"}, tools=[SHELL])
    shown, asked = (row.observed for row in stand.recorded())
    assert shown is not None and shown.scripts == ()
    assert shown.foreign == (("han", "我先看一下这个文件内容"),)
    assert asked is not None and asked.scripts == ("han",) and asked.foreign == ()


def test_what_is_kept_is_bounded_and_storable() -> None:
    assert cut("x" * 500, MOST_TEXT) == ("x" * 300, "x" * 200) and cut("x" * 9, 4) == ("xxxx", "")
    lone = ToolResult("c", "n", "half \ud83d of a face", "", 12, True)
    assert unpack(pack(Observed((lone,), scripts=("han",)))).results[0].head == "half ? of a face"
