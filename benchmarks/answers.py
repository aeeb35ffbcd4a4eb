"""The answers of the gateway benchmark's engine: SGLang's `/generate` JSON, made before anything is measured.

The text is random words of the tiny model's vocabulary; an answer of the kind `turn` ends with a tool call. The fields
are those that SGLang 0.5.23 sends with `--incremental-streaming-output`.
"""

import random
from pathlib import Path
from typing import Any

import msgspec

from proxy.engine import tiny_model
from proxy.prompt.template import ChatTemplate

VARIANTS = 61
"""Different answers per kind, so that the turns of a conversation differ."""
TOOL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "Run a command in the working directory and return what it prints.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


class Answers(msgspec.Struct):
    """The answers of one kind: each in one piece, and the same one as events."""

    whole: list[bytes]
    streams: list[list[bytes]]


def words(count: int, seed: object) -> str:
    """Text of `count` random words, the same for the same seed."""
    lines = (Path(tiny_model.__file__).parent / "tiny_words.txt").read_text().splitlines()
    vocabulary = [line.split()[0] for line in lines if not line.startswith("#")]
    return " ".join(random.Random(str(seed)).choices(vocabulary, k=count))


def make_answers(template: ChatTemplate, tokens: int, calls: bool) -> Answers:
    """Answers of exactly `tokens` tokens, including the end of the turn."""
    texts = [_ids(template, tokens, calls, seed) for seed in range(VARIANTS)]
    whole = [msgspec.json.encode(_event(template, ids, 0, len(ids))) for ids in texts]
    events = [[msgspec.json.encode(_event(template, ids, at, at + 1)) for at in range(len(ids))] for ids in texts]
    return Answers(whole, [[b"data: " + event + b"\n\n" for event in stream] for stream in events])


def chat_answer(template: ChatTemplate, tokens: int) -> bytes:
    """The first of these answers as an OpenAI server would send it."""
    text = template.decode(_ids(template, tokens, False, 0)[:-1])
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 1000, "completion_tokens": tokens, "total_tokens": 1000 + tokens}
    envelope = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "tiny"}
    return msgspec.json.encode({**envelope, "choices": [choice], "usage": usage})


def _ids(template: ChatTemplate, tokens: int, calls: bool, seed: int) -> list[int]:
    call: list[int] = []
    if calls:
        body = msgspec.json.encode({"name": "shell", "arguments": {"command": words(40, f"call {seed}")}}).decode()
        call = template.encode(f"\n<tool_call>\n{body}\n</tool_call>")
    return [*template.encode(words(tokens, seed))[: tokens - 1 - len(call)], *call, template.end]


def _event(template: ChatTemplate, ids: list[int], start: int, end: int) -> dict[str, Any]:
    """Tokens [start, end) as SGLang sends them. The last event has the finish reason."""
    new, last = ids[start:end], end == len(ids)
    draw = random.Random(end)
    meta: dict[str, Any] = {
        "id": "0123456789abcdef0123456789abcdef",
        "finish_reason": {"type": "stop", "matched": ids[-1]} if last else None,
        "prompt_tokens": 1000,
        "weight_version": "v1",
        "num_retractions": 0,
        "output_token_logprobs": [[-draw.expovariate(1.0), token, None] for token in new],
        "output_token_logprobs_length": end,
        "reasoning_tokens": 0,
        "completion_tokens": end,
        "cached_tokens": 900,
        "weight_versions": [{"version": "v1", "start": 0, "end": end}],
        "cached_tokens_details": None,
        "dp_rank": None,
    }
    if last:
        meta |= {"e2e_latency": 1.2345, "response_sent_to_client_ts": 1795167535.25}
    return {"text": template.decode(new), "output_ids": new, "meta_info": meta}
