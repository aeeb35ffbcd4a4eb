"""What a request and a client may cost, and a body's reading as a call: levels and values of JSON, and the number of
everything.

What exceeds a limit is refused in the dialect's error format, before anything is rendered or sampled. Elsewhere: bytes
of bodies (proxy/http/bodies.py), connections and their time (connections.py beside it), headers and the request line
(error_pages.py), calls at a time (admission.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from msgspec import Struct
from msgspec.structs import astuple

from proxy.call import Call, CallError
from proxy.dialects.base import Dialect, refuse
from proxy.dialects.cut_emojis import well_formed

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LEAF_TYPES = frozenset((str, int, float, bool, type(None)))
"""Types of decoded JSON values besides objects, arrays and the dialects' structs."""
LARGEST_NUMBER = 2**31 - 1
"""The largest sampling parameter: engines keep integers in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What one request and one client may cost and how long each may wait; more is refused, in the dialect's form.

    These are constants, not settings: they lie far above what agents send, and guard the proxy against broken or
    hostile clients. Tests pass smaller ones to `Gateway`.
    """

    body_bytes: int = 1 << 25
    """Bytes of the body after decompression. 32 MiB hold a context of a million tokens several times over."""
    body_seconds: float = 120
    """Time until the last byte of the body has arrived."""
    attempt_body_bytes: int = 1 << 27
    """Bytes of the bodies of one attempt's calls that have no answer yet. 128 MiB hold four of the largest."""
    all_body_bytes: int = 1 << 30
    """Bytes of all bodies that are arriving or being rendered."""
    header_seconds: float = 20
    """Time until a new connection has sent a request with a valid key."""
    idle_seconds: float = 120
    """Time that a connection may wait for its next request, headers included."""
    unread_seconds: float = 60
    """Time after which a client that takes nothing of its answer is cut off."""
    attempt_connections: int = 512
    silent_connections: int = 512
    """Connections without a valid key. When there are more, the oldest is closed."""
    attempt_calls: int = 256
    """Calls in flight of one attempt; at most half of its run's."""
    header_bytes: int = 1 << 16
    """Bytes of the request line, and of each header."""
    headers: int = 128
    nesting: int = 200
    """Levels of objects and arrays in a tool, a tool call and the options. Templates recurse into all of them, and
    Python's recursion ends at 1000."""
    values: int = 500_000
    """Objects, arrays, texts and numbers in all tools, tool calls and options: each may take 200 bytes. A conversation
    of 2,000 tool calls has some 20,000."""
    messages: int = 20_000
    tools: int = 2_000
    stop_strings: int = 31
    """SGLang 0.5.23 takes 32, and where a call is prescribed the proxy adds one, the end of reasoning."""
    stop_chars: int = 2_048
    """Characters of all of them together. SGLang tokenises them on the event loop that all its requests share, and
    compares each of their beginnings with the end of the text after every token."""
    choices: int = 64
    """Answers to one request (n, candidateCount); each one is a call in flight."""
    stored_bytes: int = 1 << 28
    """What one attempt may store of its Responses calls. 256 MiB hold a context of a million tokens many times over,
    and each call adds only what is new."""
    key_chars: int = 512
    free_refusals: int = 64
    """Refused keys of one source that are answered at once; later ones wait (proxy/http/refused_keys.py)."""
    keepalive_seconds: float = 25
    """Silence after which a client gets a sign of life. Clients and load balancers commonly give up after 30 or 60
    seconds."""
    linger_seconds: float = 60
    """Time that a call goes on after its client has gone, for a repeat. Clients repeat within a minute of a failure."""
    lingering_calls: int = 256
    """Calls of one attempt that go on without a client. When there are more, the oldest ends."""
    wait_seconds: float = 240
    """Time that a call may wait for admission before it is refused with 429. Longer than `keepalive_seconds`, so that
    codex, which gives up on a 429, gets it inside its stream."""
    unattended_seconds: float = 60
    """How long a run's call waits for an engine while no harness works at the run. Its next start takes less."""


LIMITS = RequestLimits()


Reader = Callable[[bytes, str], Call]
"""Reads a body as a call, like `Dialect.read`."""


def parse_call(body: bytes, path: str, dialect: Dialect, limits: RequestLimits, read: Reader) -> Call:
    """Read the body as a call with `read`; CallError says what is wrong or too much."""
    try:
        call = _read(body.removeprefix(BYTE_ORDER_MARK), path, read)
    except RecursionError as error:
        raise _too_deep(limits) from error
    tool_calls = [tool_call for message in call.messages for tool_call in message.get("tool_calls", ())]
    schema = call.constraint.schema if call.constraint else None
    values = (*call.tools, *tool_calls, call.options, call.echo, schema)
    if has_more_values(values, limits.values):
        rule = f"tools, tool calls and options have more than {limits.values} values; send fewer"
        raise CallError(400, "invalid_request", rule)
    if nests_deeper(values, limits.nesting):
        raise _too_deep(limits)
    for name, count, limit in (
        (dialect.PROMPT, len(call.messages), limits.messages),
        ("tools", len(call.tools), limits.tools),
        ("stop", len(call.stop), limits.stop_strings),
    ):
        if count > limit:
            refuse(name, f"has {count} entries, and at most {limit} are served; send fewer")
    if (chars := sum(map(len, call.stop))) > limits.stop_chars:
        refuse("stop", f"has {chars} characters, and at most {limits.stop_chars} are served; send shorter ones")
    if not 1 <= call.choices <= limits.choices:
        refuse(dialect.CHOICES, f"is {call.choices}; ask for 1 to {limits.choices} answers")
    for name, value in call.sampling.items():
        if abs(value) > LARGEST_NUMBER or not isfinite(value):  # `isfinite` takes no integer beyond floats
            refuse(name, f"is {value}; send a number within 32 bits")
    return call


def _read(body: bytes, path: str, read: Reader) -> Call:
    """Read the body; where it is refused because a client cut an emoji in two, read it mended."""
    try:
        return read(body, path)
    except CallError:
        mended = well_formed(body)
        if mended == body:
            raise
        return read(mended, path)


def _too_deep(limits: RequestLimits) -> CallError:
    rule = f"a tool, its arguments, a schema or an option has more than {limits.nesting} levels; send fewer levels"
    return CallError(400, "invalid_request", rule)


def nests_deeper(values: Sequence[Any], limit: int) -> bool:
    """Whether one of the values has more than `limit` levels of objects and arrays, itself included."""
    level = [value for value in values if type(value) not in LEAF_TYPES]
    for _ in range(limit):
        if not level:
            return False
        level = [inner for value in level for inner in _children(value) if type(inner) not in LEAF_TYPES]
    return bool(level)


def has_more_values(values: Sequence[Any], limit: int) -> bool:
    """Whether there are more than `limit` values with all that they hold."""
    left, count = list(values), 0
    while left and count + len(left) <= limit:
        value = left.pop()
        count += 1
        if type(value) not in LEAF_TYPES:
            left.extend(_children(value))
    return bool(left)


def _children(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return astuple(value) if isinstance(value, Struct) else value
