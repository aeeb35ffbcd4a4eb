"""What the trainer computes for recorded rows is what the engine sampled them with: every dialect, streamed and not.

The real SGLang and the trainer's Megatron model hold the same weights in float32. Each conversation is an attempt of a
training run and asks for a temperature that such a run does not grant.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from proxy.engine.sglang import Sglang
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import of_attempt
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from tests.proxy.conftest import Serve, Stand, user

if TYPE_CHECKING:
    from tests.trainer.recompute import Recompute

PER_TURN, PER_CONVERSATION = 64, 120
COLD = 0.3

Body = dict[str, Any]


@dataclass(frozen=True)
class Dialect:
    """How a dialect continues a conversation. `said` alternates between user and model."""

    path: str
    body: Callable[[list[str]], Body]
    text: Callable[[Body], str]
    """The text in an answer that is not streamed, or in one event of one that is."""
    streamed_path: str = ""


def chat(texts: list[str]) -> Body:
    return {"messages": list(map(message, range(len(texts)), texts)), "max_tokens": PER_TURN, "temperature": COLD}


def message(index: int, text: str) -> Body:
    return {"role": "assistant", "content": text} if index % 2 else user(text)


def chat_text(body: Body) -> str:
    choice = body["choices"][0]
    return (choice.get("message") or choice["delta"]).get("content") or ""


def responses(texts: list[str]) -> Body:
    return {"input": list(map(message, range(len(texts)), texts)), "max_output_tokens": PER_TURN, "temperature": COLD}


def responses_text(body: Body) -> str:
    if "type" in body:
        return str(body["delta"]) if body["type"] == "response.output_text.delta" else ""
    return "".join(part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"])


def messages_text(body: Body) -> str:
    if body["type"] == "content_block_delta":
        return str(body["delta"].get("text", ""))
    return "".join(block.get("text", "") for block in body.get("content", ()))


def gemini(texts: list[str]) -> Body:
    roles = ("user", "model")
    contents = [{"role": roles[index % 2], "parts": [{"text": text}]} for index, text in enumerate(texts)]
    return {"contents": contents, "generationConfig": {"maxOutputTokens": PER_TURN, "temperature": COLD}}


def gemini_text(body: Body) -> str:
    return "".join(part.get("text", "") for part in body["candidates"][0]["content"].get("parts", ()))


def completions(texts: list[str]) -> Body:
    return {"prompt": "".join(texts), "max_tokens": PER_TURN, "temperature": COLD}


DIALECTS = {
    "chat": Dialect("/v1/chat/completions", chat, chat_text),
    "responses": Dialect("/v1/responses", responses, responses_text),
    "messages": Dialect("/v1/messages", chat, messages_text),
    "gemini": Dialect(
        "/v1beta/models/m:generateContent", gemini, gemini_text, "/v1beta/models/m:streamGenerateContent?alt=sse"
    ),
    "completions": Dialect("/v1/completions", completions, lambda body: body["choices"][0]["text"]),
}


async def converse(stand: Stand, rollout_id: int, dialect: Dialect, stream: bool) -> list[Completion]:
    """Talk until enough tokens are sampled, and return the recorded rows."""
    attempt, key = open_attempt(stand.pool, rollout_id, "command")
    texts, rows = ["hello"], list[Completion]()
    while sum(len(row.sampled) for row in rows) < PER_CONVERSATION:
        texts += [await answer(stand, key, dialect, texts, stream), " and then?"]
        rows = of_attempt(stand.pool, attempt.id)
    return rows


async def answer(stand: Stand, key: str, dialect: Dialect, texts: list[str], stream: bool) -> str:
    path, body = dialect.path, dialect.body(texts)
    if stream and dialect.streamed_path:
        path = dialect.streamed_path
    elif stream:
        body["stream"] = True
    async with stand.send(path, body, **{"x-api-key": key}) as got:
        whole = await got.read()
    assert got.status == 200, whole
    if not stream:
        return dialect.text(msgspec.json.decode(whole)) or "."
    events = [line.removeprefix(b"data: ") for line in whole.splitlines() if line.startswith(b"data: {")]
    return "".join(dialect.text(msgspec.json.decode(event)) for event in events) or "."


async def test_recomputed_logprobs_are_the_engines(
    serve: Serve, sglang_engine: Sglang, tiny_model: Path, recompute: "Recompute"
) -> None:
    stand = await serve(url=sglang_engine.url)
    cases = [(name, stream) for name in DIALECTS for stream in (False, True)]
    members = open_group(stand.pool, open_run(stand.pool, "run", "train", {}).id, {"id": "t"}, len(cases))
    recorded = await asyncio.gather(
        *(
            converse(stand, member.rollout_id, DIALECTS[name], stream)
            for member, (name, stream) in zip(members, cases, strict=True)
        )
    )
    recomputed = [recompute(tiny_model, rows) for rows in recorded]
    for case, rows, again in zip(cases, recorded, recomputed, strict=True):
        assert again.gap <= 1e-4, case
        assert again.tokens == sum(len(row.sampled) for row in rows) >= 100 and not again.excluded, case
    assert sum(again.tokens for again in recomputed) >= 1000
    # later turns were computed behind the tokens of earlier ones
    assert sum(again.sequences for again in recomputed) < sum(map(len, recorded))
