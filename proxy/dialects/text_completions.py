"""OpenAI text completions: a prompt as text or token ids, continued unchanged, without a chat template.

Refused with a sentence: several prompts in one request, echo, suffix, best_of, logit_bias. As in OpenAI's
own service, 16 tokens are sampled where max_tokens is left out. What is not read is named in the answer's header.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.call import Call, CallError, Reply, TokenLogprob
from proxy.dialects.base import (
    COMMENT,
    DONE,
    SAMPLING_FIELDS,
    at_least_one,
    data_event,
    openai_error,
    refuse,
    refuse_any,
    usage,
    without_nones,
)
from proxy.dialects.request_fields import RequestReader
from proxy.dialects.token_logprobs import text_entries, wanted
from proxy.parsing.turn_parser import Piece, Text

NAME, PROMPT, CHOICES = "completions", "prompt", "n"
MOST_LOGPROBS = 5
DEFAULT_TOKENS = 16


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct):
    prompt: str | list[int | str | list[int]]
    model: str = ""
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    logprobs: int | None = None
    logit_bias: dict[str, Any] | None = None


_reader = RequestReader(_Request, "a completion request")


# ---- reading


def read(body: bytes, path: str) -> Call:
    """Read the request as a call; CallError 400 names the field that is wrong or not supported."""
    request, unread = _reader.read(body)
    _check(request)
    stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
    return Call(
        model=request.model,
        prompt=_prompt(request.prompt),
        max_new_tokens=DEFAULT_TOKENS if request.max_tokens is None else request.max_tokens,
        stop=tuple(filter(None, stop)),
        sampling=without_nones({name: msgspec.structs.asdict(request)[name] for name in SAMPLING_FIELDS}),
        choices=1 if request.n is None else request.n,
        logprobs=wanted(request.logprobs is not None, request.logprobs, ("logprobs", "logprobs"), MOST_LOGPROBS),
        stream=bool(request.stream),
        include_usage=bool(request.stream_options and request.stream_options.include_usage),
        ignored=unread,
    )


def _check(request: _Request) -> None:
    if request.best_of not in (None, request.n or 1):
        refuse("best_of", f"is {request.best_of}; all answers are returned, so leave it out and send n")
    refuse_any({"echo": request.echo, "suffix": request.suffix, "logit_bias": request.logit_bias})
    at_least_one({"max_tokens": request.max_tokens})


def _prompt(prompt: str | list[int | str | list[int]]) -> str | tuple[int, ...]:
    """The prompt. It may be in a list, but only alone."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0] if isinstance(prompt[0], str) else [*prompt[0]]
    if not prompt:
        refuse("prompt", "is empty; send at least one token")
    if isinstance(prompt, str):
        return prompt
    ids = tuple(id for id in prompt if isinstance(id, int))
    if len(ids) != len(prompt):
        refuse("prompt", f"has {len(prompt)} prompts; send one per request")
    return ids


# ---- answering


def reply(call: Call, answer: Reply, *others: Reply) -> bytes:
    """Write all answers of a call that is not streamed."""
    choices = [
        _choice(i, each.content, each.finish_reason, _logprobs(call, each.logprobs))
        for i, each in enumerate((answer, *others))
    ]
    return msgspec.json.encode({**_envelope(call), "choices": choices, "usage": usage(answer, *others)})


class TextEvents:
    """Writes the events of one streamed answer."""

    breaks_off = False

    def __init__(self, call: Call, prompt_tokens: int):
        self._call = call
        self._envelope = _envelope(call)

    def opening(self) -> bytes:
        return b""

    def deltas(self, pieces: Sequence[Piece], choice: int = 0) -> bytes:
        call = self._call
        return b"".join(
            self._event(choice, piece.text, logprobs=_logprobs(call, piece.tokens))
            for piece in pieces
            if isinstance(piece, Text)
        )

    def closing(self, answer: Reply, *others: Reply) -> bytes:
        events = [self._event(i, "", each.finish_reason) for i, each in enumerate((answer, *others))]
        if self._call.include_usage:
            events.append(data_event({**self._envelope, "choices": [], "usage": usage(answer, *others)}))
        return b"".join([*events, DONE])

    def failure(self, problem: CallError) -> bytes:
        return data_event(error(problem)) + DONE

    def keepalive(self) -> bytes:
        return COMMENT

    def _event(self, index: int, text: str, finish: str | None = None, logprobs: Any = None) -> bytes:
        return data_event({**self._envelope, "choices": [_choice(index, text, finish, logprobs)]})


events = TextEvents
error = openai_error


def _envelope(call: Call) -> dict[str, Any]:
    id, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
    return {"id": id, "object": "text_completion", "created": created, "model": call.model}


def _choice(index: int, text: str, finish: str | None, logprobs: dict[str, Any] | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _logprobs(call: Call, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
    return None if call.logprobs is None else text_entries(tokens, call.logprobs)
