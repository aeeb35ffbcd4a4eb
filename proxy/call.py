"""One model call between the dialects and the engine: what was asked, what is answered, what went wrong.

A dialect reads its request into a `Call` and writes its answer from a `Reply`; nothing else of it crosses.
"""

from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import msgspec


@dataclass(frozen=True)
class Constraint:
    """What an answer must be (proxy/dialects/structured_output.py): JSON of a schema, or calls of functions."""

    field: str
    """The request's field that says so."""
    schema: Any = None
    calls: tuple[str, ...] | None = None
    """The functions that may be called."""
    once: bool = False
    """Exactly one call."""


@dataclass(frozen=True)
class ToolCallGrammar:
    """A tool call as the engine must write it: JSON of a schema between two fixed texts."""

    begin: str
    schema: Any
    end: str


@dataclass(frozen=True)
class Grammar:
    """The form that the engine enforces on an answer: JSON of one schema, or, where `calls` has any, tool calls."""

    schema: Any = None
    calls: tuple[ToolCallGrammar, ...] = ()
    once: bool = False
    """The answer is exactly one call."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the agent asks."""

    model: str
    messages: tuple[dict[str, Any], ...] = ()
    """As the chat template takes them: content is text, tool-call arguments are parsed where they are JSON objects."""
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to continue as they stand, without a chat template and without looking for reasoning."""
    tools: tuple[dict[str, Any], ...] = ()
    max_new_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: dict[str, float] = field(default_factory=dict)
    """The sampling parameters that the agent named (temperature, top_p, ...)."""
    constraint: Constraint | None = None
    """The prescribed form of the answer; None where it is free."""
    choices: int = 1
    """Answers that are wanted to the one prompt."""
    stream: bool = False
    include_usage: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments for the chat template."""
    repeats: dict[str, Any] = field(default_factory=dict)
    """What the dialect's answer says again of its request."""
    ignored: tuple[str, ...] = ()
    """Wishes about the request's handling that change nothing here, by field; the answer's header names them."""


@dataclass(frozen=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """A JSON object, serialised."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the agent gets."""

    content: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """stop | length | tool_calls."""
    stop_sequence: str | None
    """The stop string that cut the text."""
    prompt_tokens: int
    sampled_tokens: int
    cached_tokens: int

    def message(self) -> dict[str, Any]:
        """The assistant message, in the form in which the pool keeps it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


class CallError(Exception):
    """A call that cannot be served: an HTTP status, a code that clients know, and one sentence."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


class ContextOverflow(CallError):
    """A prompt that does not fit into the context: agents shorten their history when they read this."""

    def __init__(self, length: int, limit: int, param: str):
        super().__init__(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {length} "
            "tokens. Please reduce the length of the messages.",
            param,
        )
        self.length = length
        self.limit = limit


def meaning(message: dict[str, Any]) -> tuple[Any, ...]:
    """What an assistant message says, apart from its form: equal meanings are the same turn."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return (
        (message.get("content") or "").strip(),
        (message.get("reasoning_content") or "").strip(),
        tuple((call["name"], _canonical(call["arguments"])) for call in calls),
    )


def words(said: tuple[Any, ...]) -> tuple[Any, ...]:
    """A meaning without the reasoning."""
    return said[0], said[2]


def _number(text: str) -> float | int:
    """The value of a number that is no 64-bit integer; JavaScript writes 1.0 as 1."""
    if text.removeprefix("-").isdigit():
        return int(text)
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} is beyond a double's range")
    return int(value) if value.is_integer() else value


_read = msgspec.json.Decoder(float_hook=_number).decode
_write = msgspec.json.Encoder(order="deterministic").encode


def _canonical(arguments: Any) -> str:
    """The same text for equal values; arguments that are no JSON stand for themselves."""
    try:
        return _write(_read(arguments if isinstance(arguments, str) else _write(arguments))).decode()
    except (msgspec.DecodeError, ValueError, OverflowError, RecursionError):
        return arguments if isinstance(arguments, str) else repr(arguments)
