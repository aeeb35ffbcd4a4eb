"""Several answers to one request: each is a row, streamed or not, and the prompt is stored once."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, cast

import pytest

from proxy.engine.engine_call import EngineError
from proxy.engine.scripted import Fault
from proxy.pool.inspect.verify import verify
from proxy.recording.parallel_answers import ParallelAnswer, answer_all
from tests.proxy.conftest import SHELL, Serve, Stand, shell_call, user

WORDS = ("one", "two", "three")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GEMINI, STREAMED = (f"/v1beta/models/tiny:{verb}" for verb in ("generateContent", "streamGenerateContent?alt=sse"))
CONTENTS = [{"parts": [{"text": "hello"}]}]
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [user("hello")], "n": 3},
    TEXT: {"prompt": "hello", "n": 3, "best_of": 3},
    GEMINI: {"contents": CONTENTS, "generationConfig": {"candidateCount": 3}},
    STREAMED: {"contents": CONTENTS, "generationConfig": {"candidateCount": 3}},
}


def in_turn() -> Callable[[str, Sequence[int]], str]:
    """A script that answers with another word each time."""
    numbers = count()
    return lambda prompt, ids: WORDS[next(numbers) % 3]


def texts(event: dict[str, Any]) -> list[tuple[int, str]]:
    """The index and text of every choice in an answer or an event."""
    numbered = []
    for choice in event.get("choices", event.get("candidates", [])):
        message = choice.get("message") or choice.get("delta") or choice
        parts = choice.get("content", {}).get("parts", []) if "candidates" in event else [{"text": message}]
        for part in parts:
            content = part["text"] if isinstance(part["text"], str) else message.get("content", message.get("text"))
            numbered.append((choice["index"], content or ""))
    return numbered


def check_rows(stand: Stand) -> None:
    """Three rows of one prompt, which the first one holds."""
    first, *others = stand.recorded()
    length = len(first.prompt_tail)
    assert len(others) == 2 and length > 0
    assert all((row.prefix_of, row.prefix_length, len(row.prompt_tail)) == (first.id, length, 0) for row in others)
    assert {row.reply["content"] for row in (first, *others)} == set(WORDS)
    assert verify(stand.pool).damages == [] and all(row.untrainable is None for row in (first, *others))


@pytest.mark.parametrize("path", [CHAT, TEXT, GEMINI])
async def test_each_answer_is_a_choice_and_a_row(path: str, serve: Serve) -> None:
    stand = await serve(in_turn())
    answer = await stand.ask(path, ASKED[path])
    numbered = texts(answer)
    assert [index for index, _ in numbered] == [0, 1, 2] and {text for _, text in numbered} == set(WORDS)
    used = answer.get("usage") or answer["usageMetadata"]
    rows = stand.recorded()
    sampled = sum(len(row.sampled) for row in rows)
    assert used.get("completion_tokens", used.get("candidatesTokenCount")) == sampled
    assert used.get("total_tokens", used.get("totalTokenCount")) == sampled + rows[0].prompt_length
    check_rows(stand)


@pytest.mark.parametrize("path", [CHAT, TEXT, STREAMED])
async def test_streamed_answers_keep_to_their_index(path: str, serve: Serve) -> None:
    stand = await serve(in_turn())
    events = await stand.events(path, ASKED[path] | ({} if path == STREAMED else {"stream": True}))
    joined: dict[int, str] = defaultdict(str)
    for event in events:
        for index, text in texts(event):
            joined[index] += text
    assert sorted(joined) == [0, 1, 2] and set(joined.values()) == set(WORDS)
    ends = Counter(
        choice["index"]
        for event in events
        for choice in event.get("choices", event.get("candidates", []))
        if choice.get("finish_reason") or choice.get("finishReason")
    )
    assert ends == {0: 1, 1: 1, 2: 1}
    check_rows(stand)


async def test_a_conversation_goes_on_from_any_of_the_answers(serve: Serve) -> None:
    numbers = count()
    stand = await serve(lambda prompt, ids: shell_call(f"ls {next(numbers)}"))
    answer = await stand.chat(user("hello"), n=2, tools=[SHELL])
    for choice in answer["choices"]:
        await stand.chat(user("hello"), choice["message"], {"role": "tool", "content": "out"}, tools=[SHELL])
    rows = stand.recorded()
    row_of_call = {row.reply["tool_calls"][0]["id"]: row.id for row in rows[:2]}
    followed = [row_of_call[choice["message"]["tool_calls"][0]["id"]] for choice in answer["choices"]]
    assert [row.follows for row in rows[2:]] == [row.prefix_of for row in rows[2:]] == followed


async def test_when_one_answer_fails_all_do_and_a_retry_gets_all(serve: Serve) -> None:
    numbers = count()
    stand = await serve(lambda prompt, ids: Fault(status=500) if next(numbers) == 1 else "fine")
    assert (await stand.chat(user("hello"), n=3))["status"] == 502
    answer = await stand.chat(user("hello"), n=3)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["fine"] * 3
    async with asyncio.timeout(60):
        while sum(row.untrainable is None for row in stand.recorded()) != 3:  # those of the first request are marked
            await asyncio.sleep(0.05)  # as delivered a moment after the client has them
    assert verify(stand.pool).damages == []


@pytest.mark.parametrize(
    ("path", "fields", "field"),
    [
        (CHAT, {"n": 0}, "n"),
        (CHAT, {"n": 65}, "n"),
        (TEXT, {"n": 2, "best_of": 5}, "best_of"),
        (GEMINI, {"generationConfig": {"candidateCount": 99}}, "generationConfig.candidateCount"),
    ],
)
async def test_too_many_answers_are_refused(path: str, fields: dict[str, Any], field: str, serve: Serve) -> None:
    stand = await serve(in_turn())
    answer = await stand.ask(path, ASKED[path] | fields)
    assert answer["status"] == 400 and answer["error"]["message"].startswith(f"{field} is ")
    assert stand.recorded() == []


async def test_none_is_being_sampled_any_more_when_a_client_goes_while_the_others_end() -> None:
    choices = [ParallelAnswer(*[cast(Any, None)] * 5) for _ in range(2)]
    ending, release, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def answer(choice: ParallelAnswer) -> Any:
        if choice is choices[0]:
            raise EngineError("failed", "on purpose")
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await release.wait()
            ended.set()

    running = asyncio.ensure_future(answer_all(choices, answer))
    await ending.wait()
    running.cancel()
    asyncio.get_running_loop().call_later(0.05, release.set)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()


@pytest.mark.parametrize("echoed", [0, 1, 2])
async def test_of_siblings_that_differ_in_white_space_the_one_that_is_echoed_goes_on(echoed: int, serve: Serve) -> None:
    words = iter(["Answer is 4. ", "Answer is 4.", "Answer is 4.\n\n", "ok"])
    stand = await serve(lambda prompt, ids: next(words))
    answers = [(await stand.chat(user("2 + 2?")))["choices"][0]["message"] for _ in range(3)]
    assert len({message["content"] for message in answers}) == 3
    await stand.chat(user("2 + 2?"), answers[echoed], user("why?"))
    assert stand.recorded()[3].follows == stand.recorded()[echoed].id
    path = stand.path(echoed)
    assert stand.path(3)[: len(path)] == path


async def test_of_equal_siblings_the_newest_goes_on(serve: Serve) -> None:
    words = iter(["Answer is 4. ", "Answer is 4. ", "Answer is 4.", "ok"])
    stand = await serve(lambda prompt, ids: next(words))
    answers = [(await stand.chat(user("2 + 2?")))["choices"][0]["message"] for _ in range(3)]
    await stand.chat(user("2 + 2?"), answers[0], user("why?"))
    assert stand.recorded()[3].follows == stand.recorded()[1].id
