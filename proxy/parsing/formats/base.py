"""The interface of a tool-call format: which markers may open a call, and how to read the text behind one.

A format sees only text; `proxy/parsing/turn_parser.py` feeds it and decides when a piece is emitted. A reading depends
on the text so far and never changes with what follows, so that every chunking gives the same pieces.
"""

import json
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import msgspec

from proxy.parsing.formats.schemas import ToolSchemas

THINK = ("<think>", "</think>")
MAX_NESTING = 200
"""Nested objects and lists; deeper arguments are no call, because agents' JSON parsers would fail on them."""


@dataclass(frozen=True)
class ParsedCall:
    """A tool call that the model wrote."""

    name: str
    arguments: str
    """A JSON object, serialised."""
    id: str = field(default="", compare=False)
    """The id that the model wrote; empty in formats that carry none."""
    source: str = field(default="", compare=False, repr=False)
    """The text of the call in the turn."""


@dataclass(frozen=True)
class Reading:
    """The result of reading from an opening marker: a call up to `end`, or no call at all."""

    end: int = 0
    call: ParsedCall | None = None
    goes_on: bool = False
    """Whether the call is in a section, where more calls or the section's end may follow."""


NO_CALL = Reading()


class Format:
    """One way of writing calls. Subclasses define the markers and `read`."""

    openers: tuple[str, ...] = ()
    """Markers that open a call or a section of calls anywhere in the text."""
    at_start: tuple[str, ...] = ()
    """Markers that open one only at the beginning of the turn's text."""
    inside: tuple[str, ...] = ()
    """Markers that open the next call of a section, behind white space only."""
    section: str = ""
    """Marker that opens a section of calls, in formats that have one; `section_end` closes it."""
    section_end: str = ""
    call: str = ""
    """Marker that opens one call."""
    written: tuple[str, str, str] | None = None
    """Text before a call's name, between name and arguments, and behind them, in formats where both are JSON."""
    opening: tuple[str, str] = ("", "")
    """Text before a turn's first call's name, from the marker on, and text that may stand behind the name."""
    ends: tuple[str, ...] = ()
    """Every call ends with one of these texts; empty where a call ends with its JSON."""

    def __init__(self, think: tuple[str, str] = THINK):
        self.think = think

    def read(self, text: str, tools: ToolSchemas) -> Reading | None:
        """Read the text, which begins with an opening marker; None while more text is needed to decide."""
        raise NotImplementedError

    def call_start(self, text: str) -> int | None:
        """Where the call begins: at 0, or behind a section's marker; None while undecided, -1 when there is none."""
        if not self.section or not text.startswith(self.section):
            return 0
        call_follows = follows(text, len(self.section), self.call)
        if not call_follows:
            return None if call_follows is None else -1
        return text.index(self.call, len(self.section))

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the prompt ends inside reasoning that the template has opened."""
        begin, end = self.think
        return prompt.rstrip().endswith(begin) and end not in prompt[prompt.rfind(begin) :]

    def ids(self, calls: Sequence[ParsedCall], taken: Collection[str]) -> list[str]:
        """An id for each call of a turn, in the form that the model's template accepts; none of them is `taken`."""
        return [f"call_{uuid.uuid4().hex[:24]}" for _ in calls]

    def lasting_ids(self, names: Sequence[str], taken: Collection[str]) -> list[str]:
        """An id for each call of a history that has none, the same in each request; none of them is `taken`.

        `names`: of the functions. The ids have nine letters and digits, as Mistral's templates refuse others.
        """
        free = (id for number in count() if (id := f"call{number:05}") not in taken)
        return list(islice(free, len(names)))


def follows(text: str, at: int, marker: str) -> bool | None:
    """Whether the marker stands at `at`, behind white space; None while undecided."""
    rest = text[at:].lstrip()
    if rest.startswith(marker):
        return True
    return None if marker.startswith(rest) else False


def past(text: str, at: int, marker: str) -> int:
    """Where the text continues behind a marker that follows."""
    return text.index(marker, at) + len(marker)


# One match is a whole string (also an unclosed one), a bracket, or a character that no JSON has outside of strings.
_JSON_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[{}\[\]]|[^\s\d"{}\[\],:.+\-a-zE]', re.DOTALL)


def object_end(text: str, at: int) -> int | None:
    """Where the JSON object at `at` ends; None while it is open, -1 when it cannot be one."""
    begins = follows(text, at, "{")
    if not begins:
        return None if begins is None else -1
    depth = 0
    for token in _JSON_TOKEN.finditer(text, at):
        mark = token[0]
        if mark[0] not in '"{}[]':
            return -1
        depth += (mark in "{[") - (mark in "}]")
        if depth == 0 and mark in "}]":
            return token.end()
    return None


def enclosed(text: str, at: int, tail: tuple[str, ...]) -> tuple[str, int] | None:
    """The JSON object at `at`, and where the markers behind it end (-1 if there is none); None while undecided."""
    end = object_end(text, at)
    if end is None:
        return None
    body = text[at : max(at, end)]
    for marker in tail if end > 0 else ():
        marker_follows = follows(text, end, marker)
        if not marker_follows:
            return None if marker_follows is None else ("", -1)
        end = past(text, end, marker)
    return body, end


def decode_object(text: str) -> dict[str, Any] | None:
    """Decode a JSON object; None for any other text."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def call_of(name: Any, arguments: Any, *, id: str = "") -> ParsedCall | None:
    """The call, if these are a name and an object that can be serialised; else None."""
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict) or _too_deep(arguments):
        return None
    try:
        return ParsedCall(name.strip(), json.dumps(arguments, ensure_ascii=False), id)
    except ValueError:  # an integer of thousands of digits
        return None


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_NESTING):
        level = [x for v in level if isinstance(v, dict | list) for x in (v.values() if isinstance(v, dict) else v)]
        if not level:
            return False
    return True


def named_object(text: str) -> ParsedCall | None:
    """The call in an object with `name` and `arguments` (Llama: `parameters`); None when it is no call."""
    value = decode_object(text) or {}
    id = value.get("id")
    arguments = value.get("arguments", value.get("parameters"))
    return call_of(value.get("name"), arguments, id=id if isinstance(id, str) else "")
