"""Requests that are almost JSON, or almost as documented, are read as the client means them."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects.cut_emojis import PIECE_BYTES, well_formed
from proxy.http.limits import LIMITS
from tests.proxy.conftest import SHELL, Seen, Serve, shell_call, user
from tests.proxy.dialect_clients import DIALECT_CLIENTS, DialectClient

CUT = "left \ud83d right"
"""An emoji of which a client's truncation left the first half."""
MENDED = "left \ufffd right"
by_dialect = pytest.mark.parametrize("client", DIALECT_CLIENTS, ids=lambda client: client.name)


@by_dialect
async def test_half_of_an_emoji_becomes_the_replacement_character(serve: Serve, client: DialectClient) -> None:
    seen = Seen(lambda prompt, ids: "ok")
    stand = await serve(seen)
    for text in (CUT, "\ude00 \ud83d\ude00 \\ud83d \\\ud83d"):
        path, body = client.request(text, stream=False)
        assert (await stand.ask(path, json.dumps(body).encode()))["status"] == 200
    assert MENDED in seen.prompts[0] and "\ufffd \U0001f600 \\ud83d \\\ufffd" in seen.prompts[1]


async def test_half_of_an_emoji_in_the_history_breaks_no_chain(serve: Serve) -> None:
    turns = iter([shell_call("ls"), "done"])
    seen = Seen(lambda prompt, ids: next(turns))
    stand = await serve(seen)
    messages = [user(CUT)]
    for result in (CUT, None):
        answer = await stand.ask("/v1/chat/completions", json.dumps({"messages": messages, "tools": [SHELL]}).encode())
        echo = answer["choices"][0]["message"]
        if result is not None:
            messages += [echo, {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": result}]
    first, second = stand.recorded()
    assert second.follows == first.id and seen.prompts[1].count(MENDED) == 2


async def test_half_of_an_emoji_in_the_text_of_arguments(serve: Serve) -> None:
    seen = Seen(lambda prompt, ids: "ok")
    stand = await serve(seen)
    call = {"id": "1", "type": "function", "function": {"name": "shell", "arguments": json.dumps({"command": CUT})}}
    history = [user("hi"), {"role": "assistant", "tool_calls": [call]}, user("go on")]
    assert (await stand.chat(*history, tools=[SHELL]))["status"] == 200
    assert f'"arguments": {{"command": "{MENDED}"}}' in seen.prompts[0]


@settings(max_examples=300, derandomize=True, database=None)
@given(st.lists(st.sampled_from(["\ud83d", "\udbff", "\ude00", "\udc00", "\\", "u", "d83d", "n", "\n", '"', "a"])))
def test_mended_json_reads_as_the_text_with_its_lone_halves_replaced(parts: list[str]) -> None:
    text = "".join(parts)
    for written in (json.dumps(text), json.dumps(text).replace("\\ud", "\\uD")):
        mended = re.sub("[\ud800-\udfff]", "\ufffd", json.loads(written))
        for piece in (12, 13, 14, 15, 16, 17, PIECE_BYTES):
            assert json.loads(well_formed(written.encode(), piece)) == mended


@pytest.mark.parametrize("unit", [b"\\", b"\\ud"], ids=["backslash", "start"])
def test_the_largest_body_keeps_no_other_thread_waiting(unit: bytes) -> None:
    """One search held the interpreter for seconds, and with it every other call."""
    body = b"\\ud800 " + unit * (LIMITS.body_bytes // len(unit))
    assert any(longest_wait(body) < 0.5 for _ in range(5))  # a busy machine makes threads wait, too, but not always


def longest_wait(body: bytes) -> float:
    """The longest time that another thread waits while a body is mended, as a share of the whole time."""
    with ThreadPoolExecutor(1) as thread:
        began = seen = time.monotonic()
        longest, mending = 0.0, thread.submit(well_formed, body)
        while not mending.done():
            time.sleep(0)
            now = time.monotonic()
            longest, seen = max(longest, now - seen), now
    assert mending.result() != body
    return longest / (seen - began)


@by_dialect
async def test_a_byte_order_mark_is_left_out(serve: Serve, client: DialectClient) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    path, body = client.request("hi", stream=False)
    assert (await stand.ask(path, b"\xef\xbb\xbf" + json.dumps(body).encode()))["status"] == 200


def _chat(**call: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}
    return {"messages": [user("hi"), message, user("go on")]}


def _items(*items: dict[str, Any]) -> dict[str, Any]:
    return {"input": [user("hi"), *items, user("go on")]}


NULLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", _chat(id=None, type=None, function={"name": "shell", "arguments": None})),
    ("/v1/responses", _items({"type": "function_call", "id": None, "call_id": None, "name": "shell",
                              "arguments": None, "input": None, "status": None})),
    ("/v1/messages", {"messages": [user("hi"), {"role": "assistant", "content": [
        {"type": "tool_use", "id": None, "name": "shell", "input": None, "text": None}]}, user("go on")]}),
    ("/v1beta/models/tiny:generateContent", {"contents": [
        {"role": "model", "parts": [{"functionCall": {"id": None, "name": "shell", "args": None}}]},
        {"role": "user", "parts": [{"text": "go on"}]}]}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body"), NULLS)
async def test_nulls_in_an_echoed_call_are_as_good_as_left_out(serve: Serve, path: str, body: dict[str, Any]) -> None:
    seen = Seen(lambda prompt, ids: "ok")
    stand = await serve(seen)
    assert (await stand.ask(path, body))["status"] == 200
    assert '{"name": "shell", "arguments": {}}' in seen.prompts[0]


REFUSAL = [{"type": "refusal", "refusal": "I will not."}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [user("hi"), {"role": "assistant", "content": REFUSAL}, user("why?")]}),
        ("/v1/responses", {"input": [user("hi"), {"role": "assistant", "content": REFUSAL}, user("why?")]}),
    ],
)
async def test_a_refusal_part_is_read_as_text(serve: Serve, path: str, body: dict[str, Any]) -> None:
    seen = Seen(lambda prompt, ids: "ok")
    stand = await serve(seen)
    assert (await stand.ask(path, body))["status"] == 200
    assert "assistant\nI will not." in seen.prompts[0]
