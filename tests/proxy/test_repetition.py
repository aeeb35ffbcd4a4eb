"""Answers that only repeat themselves are ended in training runs, by their tokens alone; honest ones never."""

import asyncio
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.honest_texts import ENDED, HONEST
from proxy.engine import repetition
from proxy.engine.repetition import BLOCK, REACH, RepetitionWatch
from proxy.engine.scripted import Fault, ScriptedReply
from proxy.pool.completions.records import Completion
from proxy.pool.inspect.verify import verify
from proxy.prompt.template import ChatTemplate
from proxy.sampling import LONG_ANSWER_TOKENS
from tests.captures.player import written
from tests.captures.recorded import sessions
from tests.proxy.conftest import SHELL, Serve, Stand, user
from tests.proxy.dialect_clients import DIALECT_CLIENTS, DialectClient
from tests.proxy.test_outage import Engine, engine, outage, until
from tests.proxy.test_purposes import issued_key
from tests.proxy.test_routed_experts import expected, mixture, stand_for
from trainer.data.assemble import merge, why_not_trainable

__all__ = ["engine", "mixture"]
LOOP = " and again I read the file, because"
SOONEST, FEW = 61 * BLOCK, 15 * BLOCK
"""Where an answer ends that repeats itself from the first block on, which is new; and the same with few blocks."""


@pytest.fixture
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let 14 of 15 blocks do, which takes less time."""
    monkeypatch.setattr(repetition, "BLOCKS", 15)
    monkeypatch.setattr(repetition, "REPEATED", 14)


def end_of(ids: Sequence[int], at_once: int = 1 << 20) -> int | None:
    """Where an answer is ended that comes in events of so many tokens."""
    watch, answer = RepetitionWatch(), array("i")
    for start in range(0, len(ids), at_once):
        answer.extend(ids[start : start + at_once])
        if (end := watch.end(answer, len(answer))) is not None:
            return end
    return None


def drawn(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(150_000) for _ in range(count)]


@pytest.mark.parametrize("period", [1, 2, 63, 64, 65, 200, REACH])
def test_a_loop_ends_at_one_place_however_its_tokens_come(period: int) -> None:
    ids = drawn(1000) + drawn(period, 1) * (9000 // period)
    begun = -(-1000 // BLOCK)  # the first block that is in the loop alone
    repeated = begun + -(-period // BLOCK)
    ends = {at_once: end_of(ids, at_once) for at_once in (1, 3, 64, 1000, len(ids))}
    assert len(set(ends.values())) == 1 and ends[1] is not None
    assert ends[1] <= (repeated + 60) * BLOCK
    assert end_of(ids[: ends[1] - 1]) is None


def test_a_few_slips_do_not_hide_a_loop_and_longer_loops_are_not_seen() -> None:
    once = drawn(40)
    assert end_of((once * 30 + drawn(5, 2)) * 20) is not None
    assert end_of((once * 10 + drawn(5, 2)) * 60) is None  # so many slips that it may be something else
    assert end_of(drawn(REACH + 1) * 100) is None


def test_the_last_block_of_an_ended_answer_repeats() -> None:
    """An answer that has left its loop is not ended any more."""
    ids = drawn(10) * (SOONEST // 10)
    assert end_of(ids[: SOONEST - BLOCK] + drawn(5000)) is None


def test_a_new_token_in_each_row_keeps_an_answer() -> None:
    for size in (4, 50, 64, 65, 100, 128, 200, 255, 256, 300, 512):
        row = drawn(size - 1, size)
        ids = [token for number in range(20_000 // size) for token in (*row, 200_000 + number)]
        assert end_of(ids) is None, size


def test_bytes_that_look_like_a_block_between_two_tokens_are_none() -> None:
    """The bytes of 0x00000100 also stand in those of a row of 0x00010000, one byte later."""
    watch = RepetitionWatch()
    watch.end(array("i", [0x00010000] * BLOCK + [0x00000100] * 2 * BLOCK), 3 * BLOCK)
    assert watch.repeats == 0b001


def test_recorded_agents_and_honest_texts_are_never_ended(template: ChatTemplate) -> None:
    replies = [written(each.reply) for session in sessions() for each in session.exchanges if each.reply]
    assert len(replies) > 300 and not [text for text in replies if end_of(template.encode(text))]
    assert [name for name, text in HONEST.items() if end_of(template.encode(text))] == []
    assert [name for name, text in ENDED.items() if end_of(template.encode(text)) is None] == []


def stuck(prompt: str, ids: Sequence[int]) -> ScriptedReply:
    return ScriptedReply(LOOP * 200, end=False, tokens_per_event=48, seconds_per_token=1e-5)


def check_row(stand: Stand, key: str, size: int = FEW) -> Completion:
    """The last row has what was sampled up to the place, whole and trainable, and alone is trained."""
    rows = stand.recorded(key)
    row = rows[-1]
    assert (row.finish_reason, len(row.sampled), len(row.logprobs)) == ("repetition", size, row.sampled_count)
    assert (row.versions[-1].end, row.untrainable) == (size, None)
    trained = merge(rows, 1.0, Counter(), why_not_trainable)
    assert sum(int(each.trained.sum()) for each in trained) == row.sampled_count
    assert verify(stand.pool).damages == []
    return row


CUT = {
    "chat": b'"finish_reason":"length"', "completions": b'"finish_reason":"length"', "messages": b'"max_tokens"',
    "gemini": b'"MAX_TOKENS"', "responses": b'"incomplete_details":{"reason":"max_output_tokens"}',
}  # fmt: skip


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("client", DIALECT_CLIENTS, ids=lambda client: client.name)
async def test_every_dialect_reports_its_truncation(
    serve: Serve, template: ChatTemplate, client: DialectClient, stream: bool
) -> None:
    stand = await serve(stuck)
    key = issued_key(stand, "train")
    longer = {"max_tokens": 20_000} if "max_tokens" in client.body("go") else {}
    path, body = client.request("go", stream, **longer)
    async with stand.send(path, body, **{"x-api-key": key}) as answer:
        data = await answer.read()
    row = check_row(stand, key)
    assert client.text_of(data, stream) == template.decode(row.sampled) and CUT[client.name] in data
    assert stand.engine is not None and stand.engine.aborted == 1
    async with stand.http.get(f"{stand.url}/metrics") as metrics:
        assert "blackforge_stopped_repetitions_total 1.0" in await metrics.text()


@pytest.mark.parametrize(
    ("purpose", "limit"), [("session", 6000), ("eval", 6000), ("collect", 6000), ("train", LONG_ANSWER_TOKENS)]
)
async def test_other_calls_and_short_answers_go_on_to_their_limit(serve: Serve, purpose: str, limit: int) -> None:
    stand = await serve(lambda *_: ScriptedReply(LOOP * 600, end=False, tokens_per_event=500))
    key = "agent" if purpose == "session" else issued_key(stand, purpose)
    answer = await stand.chat(user("go"), key=key, max_tokens=limit)
    [row] = stand.recorded(key)
    assert answer["choices"][0]["finish_reason"] == row.finish_reason == "length" and len(row.sampled) == limit


@pytest.mark.usefixtures("few_blocks")
async def test_the_next_turn_goes_on_from_what_was_kept(serve: Serve, template: ChatTemplate) -> None:
    stand = await serve(lambda prompt, ids: "sorry" if "stop it" in prompt else stuck(prompt, ids))
    key = issued_key(stand, "train")
    message = (await stand.chat(user("go"), key=key))["choices"][0]["message"]
    await stand.chat(user("go"), message, user("stop it"), key=key)
    cut, after = stand.recorded(key)
    assert after.follows == cut.id and stand.path(1, key)[: len(stand.path(0, key))] == stand.path(0, key)
    glue = stand.path(1, key)[len(stand.path(0, key)) : after.prompt_length]
    assert template.decode(glue).startswith("<|im_end|>\n<|im_start|>user\nstop it")


@pytest.mark.usefixtures("few_blocks")
async def test_each_of_several_answers_ends_for_itself(serve: Serve) -> None:
    said: Iterator[ScriptedReply] = iter([stuck("", ()), ScriptedReply("done"), stuck("", ())])
    stand = await serve(lambda prompt, ids: next(said))
    key = issued_key(stand, "train")
    answer = await stand.chat(user("go"), key=key, n=3)
    assert sorted(choice["finish_reason"] for choice in answer["choices"]) == ["length", "length", "stop"]
    rows = stand.recorded(key)
    assert sorted(row.finish_reason for row in rows) == ["repetition", "repetition", "stop"]
    assert {len(row.sampled) for row in rows if row.finish_reason == "repetition"} == {FEW}


FORCED: dict[str, Any] = {"tools": [SHELL], "tool_choice": {"type": "function", "function": {"name": "shell"}}}


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("thinks", [True, False])
async def test_a_forced_call_ends_in_its_reasoning_or_in_its_arguments(serve: Serve, thinks: bool) -> None:
    stand = await serve(stuck)
    key = issued_key(stand, "train")
    options = {} if thinks else {"chat_template_kwargs": {"enable_thinking": False}}
    answer = (await stand.chat(user("go"), key=key, **FORCED, **options))["choices"][0]
    [row] = stand.recorded(key)
    assert answer["finish_reason"] == "length" and not answer["message"].get("tool_calls") and len(row.given) == 1
    spans = sorted([*row.given, *((span.start, span.end) for span in row.versions)])
    assert spans[0][0] == 0 and spans[-1][1] == len(row.sampled) == row.sampled_count + row.given_count
    assert row.finish_reason == "repetition" and len(row.sampled) % BLOCK == 0 and row.untrainable is None
    assert verify(stand.pool).damages == []


@pytest.mark.usefixtures("few_blocks")
async def test_a_call_before_the_loop_ends_an_answer_that_may_have_one(serve: Serve) -> None:
    call = '<tool_call>\n{"name": "shell", "arguments": {"command": "ls"}}\n</tool_call>'
    stand = await serve(lambda *_: ScriptedReply(call + LOOP * 200, end=False, tokens_per_event=9000))
    key = issued_key(stand, "train")
    answer = await stand.chat(user("go"), key=key, tools=[SHELL], parallel_tool_calls=False)
    assert answer["choices"][0]["finish_reason"] == stand.recorded(key)[0].finish_reason == "tool_calls"


@pytest.mark.usefixtures("few_blocks")
async def test_experts_are_recorded_up_to_the_place(serve: Serve, mixture: Path) -> None:  # noqa: F811
    stand = await stand_for(serve, mixture, stuck)
    key = issued_key(stand, "train")
    await stand.chat(user("go"), key=key)
    row = check_row(stand, key)
    assert row.experts is not None and row.experts.end == len(stand.path(0, key)) - 1
    assert row.experts.ids == expected(stand.path(0, key), row)


@pytest.mark.usefixtures("few_blocks")
async def test_another_replica_begins_again(serve: Serve) -> None:
    said = iter([Fault(text=LOOP * 200, after=700), stuck("", ())])
    stand = await serve(lambda prompt, ids: next(said), replicas=2)
    key = issued_key(stand, "train")
    await stand.chat(user("go"), key=key)
    check_row(stand, key)
    lost, _ = stand.recorded(key)
    assert (lost.finish_reason, len(lost.sampled)) == ("error", 700)


@pytest.mark.usefixtures("few_blocks")
async def test_tokens_of_before_an_outage_count(serve: Serve, engine: Engine) -> None:  # noqa: F811
    """The engine dies in the middle of the loop; another goes on behind its tokens."""
    stand = await serve(url=engine.url, limits={"unattended_seconds": 600})
    key = issued_key(stand, "train")
    whole = LOOP * 200
    engine.served.script = lambda prompt, ids: Fault(text=whole, after=400, hang=True)
    body = {"model": "tiny", "messages": [user("go")], "stream": True}
    events = bytearray()

    async def read() -> None:
        async with stand.post(body, key) as answer:
            async for chunk in answer.content.iter_any():
                events.extend(chunk)

    async def begun() -> bool:
        return events.count(b"data: ") > 300

    task = asyncio.create_task(read())
    await until(begun)
    await engine.kill()

    async def seen() -> bool:
        return bool((await outage(stand))["away"])

    await until(seen)
    await engine.start()
    engine.served.script = lambda prompt, ids: ScriptedReply(whole, end=False, tokens_per_event=50)
    await task
    [row] = stand.recorded(key)
    assert row.finish_reason == "repetition" and FEW <= len(row.sampled) <= FEW + 5 * BLOCK
    assert len(row.versions) == 2 and row.untrainable is None and verify(stand.pool).damages == []


@pytest.mark.usefixtures("few_blocks")
async def test_a_retry_gets_the_recorded_answer(serve: Serve) -> None:
    stand = await serve(lambda *_: ScriptedReply(LOOP * 200, end=False, tokens_per_event=8, seconds_per_token=0.0005))
    key = issued_key(stand, "train")
    async with stand.post({"model": "tiny", "messages": [user("go")], "stream": True}, key) as answer:
        await answer.content.readany()

    async def recorded() -> bool:
        return bool(stand.recorded(key))

    async def delivered() -> bool:
        return stand.recorded(key)[0].untrainable is None

    await until(recorded)
    again = await stand.chat(user("go"), key=key)
    await until(delivered)
    row = check_row(stand, key)
    assert len(stand.recorded(key)) == 1
    choice = again["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", row.reply["content"])


@pytest.mark.usefixtures("few_blocks")
async def test_a_stored_response_reads_as_it_was_sent(serve: Serve) -> None:
    stand = await serve(stuck)
    key = issued_key(stand, "train")
    sent = await stand.ask("/v1/responses", {"model": "tiny", "input": "go"}, **{"x-api-key": key})
    async with stand.http.get(f"{stand.url}/v1/responses/{sent['id']}", headers={"x-api-key": key}) as answer:
        stored = await answer.json()
    assert sent["status"] == 200 and stored["status"] == "incomplete"
    assert stored["incomplete_details"] == sent["incomplete_details"] == {"reason": "max_output_tokens"}
