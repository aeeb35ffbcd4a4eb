"""What an assistant message says, normalised: messages of equal meaning are the same turn.

JavaScript clients hold every number as a double, so they echo integers beyond 2^53 changed. `as_javascript` says how.
"""

import json
import re
from decimal import Decimal
from functools import partial
from heapq import nlargest
from math import isfinite
from typing import Any

import msgspec

LARGEST_EXACT = 2**53
"""JavaScript holds every integer up to here exactly."""
LARGEST_PLAIN = 10**21
"""JavaScript writes numbers from here on with an exponent."""
DISTINCTIVE, QUOTED = 16, 200
"""Characters that a line needs to tell one turn from others, and how many of it are looked for."""
LINES = 4
"""The longest lines of a text stand for it: agents cut, indent and escape what they quote."""
MAY_CHANGE = re.compile(r"\d{16}")
"""Stands in every text with an integer beyond 2^53."""


def meaning(message: dict[str, Any]) -> tuple[Any, ...]:
    """Text, reasoning and tool calls of an assistant message, normalised: equal meanings are the same turn."""
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return (
        (message.get("content") or "").strip(),
        (message.get("reasoning_content") or "").strip(),
        tuple((call["name"], _canonical(call["arguments"])) for call in calls),
    )


def without_reasoning(turn: tuple[Any, ...]) -> tuple[Any, ...]:
    """Text and tool calls of a meaning."""
    return turn[0], turn[2]


def distinctive_lines(text: str) -> list[str]:
    """The longest lines of a text, by which it is recognised where an agent quotes it. None where all are short."""
    lines = (line.strip() for line in text.splitlines())
    return [line[:QUOTED] for line in nlargest(LINES, lines, key=len) if len(line) >= DISTINCTIVE]


def as_javascript(spoken: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a JavaScript client makes of text and tool calls: large integers of calls as JSON.stringify writes them."""
    text, calls = spoken
    if not any(MAY_CHANGE.search(arguments) for _, arguments in calls):
        return spoken
    return text, tuple((name, _changed(arguments)) for name, arguments in calls)


def _changed(arguments: str) -> str:
    try:
        return _written(_doubled(_read(arguments)))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return arguments


def _doubled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _doubled(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_doubled(each) for each in value]
    if not isinstance(value, int) or abs(value) <= LARGEST_EXACT:
        return value
    try:
        double = float(value)
    except OverflowError:  # Infinity, which JSON.stringify writes as null
        return None
    return int(double) if abs(double) >= LARGEST_PLAIN else int(Decimal(repr(double)))  # zeros behind 17 digits


def _number(text: str) -> float | int:
    """The value of a number that is not a 64-bit integer. 1.0 becomes 1, as JavaScript clients write it."""
    if text.removeprefix("-").isdigit():
        return int(text)
    value = float(text)
    if not isfinite(value):
        raise ValueError(f"{text} exceeds the range of a double")
    return int(value) if value.is_integer() else value


_read = msgspec.json.Decoder(float_hook=_number).decode
_write = msgspec.json.Encoder(order="deterministic").encode
_write_any_integer = partial(json.dumps, sort_keys=True, ensure_ascii=False, separators=(",", ":"))


def _written(value: Any) -> str:
    try:
        return _write(value).decode()
    except OverflowError:  # msgspec writes no integer beyond 64 bits
        return _write_any_integer(value)


def _canonical(arguments: Any) -> str:
    """Write equal arguments as the same text. Arguments that are not JSON are returned as they are."""
    try:
        return _written(_read(arguments if isinstance(arguments, str) else _written(arguments)))
    except (msgspec.DecodeError, ValueError, RecursionError):
        return arguments if isinstance(arguments, str) else repr(arguments)
