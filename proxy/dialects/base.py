"""What the handler needs of a dialect, and what several dialects write alike.

A dialect is a module. Its functions, in this order: read, then reply, Stream and error; some can count a prompt too.
"""

import base64
import binascii
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import msgspec

from proxy.call import Call, CallError, Reply
from proxy.parsing.turn_parser import Piece

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
SEAL = b"blackforge:"
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
"""Sampling parameters that a request may name."""


class EventStream(Protocol):
    """The events of one streamed answer, as bytes to send."""

    def opening(self) -> bytes:
        """What comes before everything else."""

    def deltas(self, pieces: Sequence[Piece], choice: int = 0) -> bytes:
        """Text and reasoning of one answer, which may leave at once; tool calls wait for the closing."""

    def closing(self, answer: Reply, *others: Reply) -> bytes:
        """What a client can act on: only after the rows are committed."""

    def failure(self, problem: CallError) -> bytes:
        """An error after the stream has begun."""

    def keepalive(self) -> bytes:
        """What says nothing but keeps the client waiting; may be empty."""


class Dialect(Protocol):
    """A module of proxy.dialects."""

    @property
    def PROMPT(self) -> str:
        """The field that holds the prompt."""

    @property
    def CHOICES(self) -> str:
        """The field that says how many answers are wanted; empty where the dialect knows none."""

    def read(self, body: bytes, path: str) -> Call:
        """The request (path with query) as a call; CallError (400) names the field that is wrong or not supported."""

    def reply(self, call: Call, answer: Reply, *others: Reply) -> bytes:
        """All answers of a call that is not streamed; where a dialect knows one, `others` are none."""

    def events(self, call: Call, prompt_tokens: int) -> EventStream:
        """The events of one streamed answer."""

    def error(self, problem: CallError) -> dict[str, Any]:
        """An error in the dialect's form."""


class CountingDialect(Dialect, Protocol):
    """A dialect that can be asked how long a prompt is."""

    def count(self, tokens: int) -> bytes:
        """The answer to that."""


def refuse(field: str, rule: str) -> NoReturn:
    raise CallError(400, "invalid_request", f"{field} {rule}", field)


def refuse_any(fields: dict[str, Any], why: str = "is not served; leave it out") -> None:
    """Refuse the first of these fields that says anything."""
    for name, value in fields.items():
        if value:
            refuse(name, why)


def at_least_one(limits: dict[str, int | None]) -> None:
    """Refuse the first of these limits on sampled tokens that leaves no room."""
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            refuse(name, f"is {limit}; ask for at least 1 token")


def unreadable(what: str, error: Exception) -> CallError:
    return CallError(400, "invalid_request", f"the body is not {what}: {error}")


def parsed_arguments(arguments: str) -> Any:
    """Tool-call arguments as chat templates want them: an object, or the text where it is none."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def tool_definition(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool as chat templates want it."""
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def tool_call(id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call of the history as chat templates want it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def effort_options(asked: str | None) -> dict[str, Any]:
    """A reasoning effort as arguments for the chat template; templates that know none of them ignore them."""
    return {"enable_thinking": False} if asked == "none" else without_nones({"reasoning_effort": asked})


def sealed(reasoning: str) -> str:
    """Reasoning for the opaque field that clients return unread."""
    return base64.b64encode(SEAL + reasoning.encode()).decode()


def unsealed(field: str | None) -> str:
    """The reasoning in a field that is ours; nothing in one of another provider."""
    try:
        carried = base64.b64decode(field or "", validate=True)
        return carried.removeprefix(SEAL).decode() if carried.startswith(SEAL) else ""
    except (binascii.Error, ValueError):
        return ""


def without_nones(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def data_event(value: dict[str, Any]) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """A server-sent event with its type as its name."""
    return b"event: " + value["type"].encode() + b"\n" + data_event(value)


def openai_error(problem: CallError) -> dict[str, Any]:
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    kind = "rate_limit_error" if problem.status == 429 else kind
    return {"error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}}


def usage(answer: Reply, *others: Reply) -> dict[str, Any]:
    """The tokens of a prompt and its answers in the form of the older OpenAI dialects."""
    sampled = sum(each.sampled_tokens for each in (answer, *others))
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
