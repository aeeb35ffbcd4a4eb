"""Requests that forbid tool calls: the tools stay in the prompt, and what looks like a call is text."""

from typing import Any

import pytest

from proxy.pool.completions.store import labelled
from tests.proxy.conftest import SHELL, Seen, Serve, shell_call, user

FUNCTION: dict[str, Any] = SHELL["function"]  # type: ignore[assignment]
PARAMETERS = FUNCTION["parameters"]
GEMINI_TOOL = {"functionDeclarations": [{"name": "shell", "description": "run a command", "parameters": PARAMETERS}]}
FORBIDDEN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [user("hello")], "tools": [SHELL], "tool_choice": "none"},
    "/v1/responses": {"input": "hello", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "none"},
    "/v1/messages": {
        "messages": [user("hello")],
        "max_tokens": 99,
        "tools": [{"name": "shell", "description": "run a command", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "none"},
    },
    "/v1beta/models/tiny:generateContent": {
        "contents": [{"parts": [{"text": "hello"}]}],
        "tools": [GEMINI_TOOL],
        "toolConfig": {"functionCallingConfig": {"mode": "NONE"}},
    },
}


@pytest.mark.parametrize("path", FORBIDDEN)
async def test_the_tools_stay_in_the_prompt_and_a_call_is_text(path: str, serve: Serve) -> None:
    script = Seen(lambda prompt, ids: shell_call("ls"))
    stand = await serve(script)
    assert (await stand.ask(path, FORBIDDEN[path]))["status"] == 200
    assert '"name": "shell"' in script.prompts[0]
    (row,) = stand.recorded()
    assert row.reply == {"role": "assistant", "content": shell_call("ls")} and row.finish_reason == "stop"
    assert row.untrainable is None and row.observed is not None and not row.observed.broken


async def test_a_summary_goes_on_from_the_tokens_of_the_conversation_and_is_a_compaction(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "notes" if "Sum up." in prompt else shell_call("ls"))
    first = await stand.chat(user("say hello"), tools=[SHELL])
    turn = [user("say hello"), first["choices"][0]["message"], {"role": "tool", "content": "out"}]
    await stand.chat(*turn, user("Sum up."), tools=[SHELL], tool_choice="none")
    await stand.chat(user("say hello\nnotes"), tools=[SHELL])
    assert [row.label for row in labelled(stand.recorded())] == ["main", "compaction", "main"]
    assert stand.path(1)[: len(stand.path(0))] == stand.path(0)
    assert stand.recorded()[1].follows == stand.recorded()[0].id
