"""The interface of a dialect, and what several dialects share.

A dialect is a module with these functions, in this order: read, reply, events, error; some have count, too.
"""

import base64
import binascii
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, Protocol

import msgspec

from proxy.call import Call, CallError, Reply
from proxy.dialects.cut_emojis import well_formed
from proxy.parsing.turn_parser import Piece

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
SEAL = b"blackforge:"
GRAMMAR = "The input follows this grammar:"
"""Begins the grammar of a custom tool in its description."""
SEALED = "YmxhY2tmb3JnZT"
"""What base64 makes of the seal, as far as the text after it does not change it."""
FROM_URLS = str.maketrans("-_", "+/")
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
    """Writes the events of one streamed answer, as bytes to send."""

    @property
    def breaks_off(self) -> bool:
        """Whether the connection is broken behind a failure, because clients may take its event for an answer."""

    def opening(self) -> bytes:
        """The events before any text."""

    def deltas(self, pieces: Sequence[Piece], choice: int = 0) -> bytes:
        """Text and reasoning of one answer, which may leave at once. Tool calls are left to `closing`."""

    def closing(self, answer: Reply, *others: Reply) -> bytes:
        """What a client can act on: tool calls and finish reasons. To be sent only after the rows are committed."""

    def failure(self, problem: CallError) -> bytes:
        """An error after the stream has begun."""

    def keepalive(self) -> bytes:
        """An event without content that keeps the client waiting; may be empty."""


class Dialect(Protocol):
    """A module of proxy.dialects."""

    @property
    def NAME(self) -> str:
        """Its name in metrics."""

    @property
    def PROMPT(self) -> str:
        """The field that holds the prompt."""

    @property
    def CHOICES(self) -> str:
        """The field with the number of answers; empty where the dialect has none."""

    def read(self, body: bytes, path: str) -> Call:
        """Read the request (`path` has its query) as a call; CallError 400 names the field that is wrong."""

    def reply(self, call: Call, answer: Reply, *others: Reply) -> bytes:
        """Write all answers of a call that is not streamed. `others` is empty in dialects with one answer."""

    def events(self, call: Call, prompt_tokens: int) -> EventStream:
        """Make the writer of the events of a streamed call."""

    def error(self, problem: CallError) -> dict[str, Any]:
        """The error in the dialect's format."""


class CountingDialect(Dialect, Protocol):
    """A dialect with a request that asks for the length of a prompt."""

    def count(self, tokens: int) -> bytes:
        """Write the answer to it."""


def refuse(field: str, rule: str) -> NoReturn:
    """Raise CallError 400 for a field. `rule` continues its name: what it is, and what to send instead."""
    raise CallError(400, "invalid_request", f"{field} {rule}", field)


def refuse_any(fields: dict[str, Any], why: str = "is not served; leave it out") -> None:
    """Refuse the first of these fields that is set."""
    for name, value in fields.items():
        if value:
            refuse(name, why)


def at_least_one(limits: dict[str, int | None]) -> None:
    """Refuse the first of these token limits that is below 1."""
    for name, limit in limits.items():
        if limit is not None and limit < 1:
            refuse(name, f"is {limit}; ask for at least 1 token")


def parsed_arguments(arguments: str | None) -> Any:
    """Tool-call arguments in the chat template's form: an object, or the text where it is not one."""
    try:
        value = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        written = (arguments or "").encode()
        mended = well_formed(written)
        return arguments if mended == written else parsed_arguments(mended.decode())
    return value if isinstance(value, dict) else arguments


def tool_definition(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool in the chat template's form."""
    described = {"description": description} if description else {}
    return {"type": "function", "function": {"name": name, **described, "parameters": parameters}}


def tool_call(id: str | None, name: str, arguments: Any) -> dict[str, Any]:
    """A tool call of the history in the chat template's form."""
    return {"id": id or "", "type": "function", "function": {"name": name, "arguments": arguments}}


def effort_options(asked: str | None) -> dict[str, Any]:
    """A reasoning effort as arguments of the chat template."""
    return {"enable_thinking": False} if asked == "none" else without_nones({"reasoning_effort": asked})


def options_of(*asked: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """A call's `options` and `fields`, of (field of the request, arguments that it asks for). The last one counts."""
    options = {name: (field, value) for field, values in asked for name, value in values.items()}
    return {
        "options": {name: value for name, (_, value) in options.items()},
        "fields": {name: field for name, (field, _) in options.items()},
    }


def sealed(reasoning: str) -> str:
    """Encode reasoning for an opaque field, which clients send back unread."""
    return base64.b64encode(SEAL + reasoning.encode()).decode()


def unread_of_form(field: str, form: dict[str, Any] | None) -> Iterator[str]:
    """The fields of OpenAI's `json_schema` form, in `field` or an object in it, that change nothing.

    `strict` is one of them: whether the engine enforces a schema is decided for all requests (proxy.prescribed).
    """
    place, values = (f"{field}.json_schema", form["json_schema"]) if form and "json_schema" in form else (field, form)
    if isinstance(values, dict):
        yield from (f"{place}.{name}" for name in ("name", "description", "strict") if values.get(name) is not None)


def is_sealed(field: str) -> bool:
    """Whether this proxy wrote an opaque field."""
    return field.startswith(SEALED)


def unsealed(field: str | None) -> str:
    """Decode reasoning from an opaque field; empty where another provider wrote the field.

    Google's Python client encodes the field again, in the alphabet for URLs.
    """
    try:
        carried = base64.b64decode((field or "").translate(FROM_URLS), validate=True)
        return carried.removeprefix(SEAL).decode() if carried.startswith(SEAL) else ""
    except (binascii.Error, ValueError):
        return ""


def without_nones(values: dict[str, Any]) -> dict[str, Any]:
    """The values that are not None."""
    return {name: value for name, value in values.items() if value is not None}


def data_event(value: dict[str, Any]) -> bytes:
    """A server-sent event without a name."""
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """A server-sent event with its type as its name."""
    return b"event: " + value["type"].encode() + b"\n" + data_event(value)


def openai_error(problem: CallError) -> dict[str, Any]:
    """The error in OpenAI's format."""
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    kind = "rate_limit_error" if problem.status == 429 else kind
    return {"error": {"message": str(problem), "type": kind, "param": problem.param, "code": problem.code}}


def usage(answer: Reply, *others: Reply) -> dict[str, Any]:
    """Token counts of a prompt and its answers, as chat and text completions write them."""
    sampled = sum(each.sampled_tokens for each in (answer, *others))
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": answer.prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }
