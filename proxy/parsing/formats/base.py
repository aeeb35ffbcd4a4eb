"""What every tool-call format answers: which markers may open a call, and what the text behind one of them is.

A format looks at text only; `proxy/parsing/turn_parser.py` feeds it and decides what leaves when. An answer depends on
the text so far and never changes with what follows, so that every chunking gives the same pieces.
"""

import json
import re
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from proxy.parsing.formats.schemas import ToolSchemas

THINK = ("<think>", "</think>")
MAX_NESTING = 200
"""Objects and lists within each other; arguments beyond are no call, as agents' JSON parsers would fail on them."""


@dataclass(frozen=True)
class ParsedCall:
    name: str
    arguments: str
    """A JSON object, serialised."""
    id: str = field(default="", compare=False)
    """As the model wrote it; empty in formats that carry none."""
    source: str = field(default="", compare=False, repr=False)
    """The text of the turn that is this call."""


@dataclass(frozen=True)
class Reading:
    """What begins at an opening marker: a call up to `end`, or no call at all."""

    end: int = 0
    call: ParsedCall | None = None
    goes_on: bool = False
    """Whether the call stands in a section, where more calls or the section's end may follow."""


NO_CALL = Reading()


class Format:
    """One way of writing calls. Subclasses say the markers and `read`."""

    openers: tuple[str, ...] = ()
    """Markers that open a call or a section of calls wherever they stand."""
    at_start: tuple[str, ...] = ()
    """Markers that do so only at the beginning of the turn's text."""
    inside: tuple[str, ...] = ()
    """Markers that open the next call of a section; nothing but white space may stand before them."""
    section: str = ""
    """Marker of a section of calls, where the format has one; then `section_end` ends it."""
    section_end: str = ""
    call: str = ""
    """Marker of one call."""
    written: tuple[str, str, str] | None = None
    """What the model writes before a call's name, between name and arguments, and behind them, where both are JSON."""
    ends: tuple[str, ...] = ()
    """One of these texts is the last of every call; none where a call ends with its JSON."""

    def __init__(self, think: tuple[str, str] = THINK):
        self.think = think

    def read(self, text: str, tools: ToolSchemas) -> Reading | None:
        """What the text, which begins with an opening marker, is; None while more text decides."""
        raise NotImplementedError

    def call_start(self, text: str) -> int | None:
        """Where the call begins: at once, or behind a section's marker. None while open, -1 when none does."""
        if not self.section or not text.startswith(self.section):
            return 0
        found = follows(text, len(self.section), self.call)
        if not found:
            return None if found is None else -1
        return text.index(self.call, len(self.section))

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the prompt ends inside a reasoning section that the template has opened."""
        begin, end = self.think
        return prompt.rstrip().endswith(begin) and end not in prompt[prompt.rfind(begin) :]

    def ids(self, calls: Sequence[ParsedCall], taken: Collection[str]) -> list[str]:
        """An id for each call of a turn, in the form that the model's template expects to see again."""
        return [f"call_{uuid.uuid4().hex[:24]}" for _ in calls]


def follows(text: str, at: int, marker: str) -> bool | None:
    """Whether the marker comes at `at`, after white space; None while that is open."""
    rest = text[at:].lstrip()
    if rest.startswith(marker):
        return True
    return None if marker.startswith(rest) else False


def past(text: str, at: int, marker: str) -> int:
    """Where the text goes on after a marker that follows."""
    return text.index(marker, at) + len(marker)


# A string counts as a whole, also one that is not closed yet; the last group stands outside of strings in no JSON.
_JSON_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[{}\[\]]|[^\s\d"{}\[\],:.+\-a-zE]', re.DOTALL)


def object_end(text: str, at: int) -> int | None:
    """Where the JSON object that follows at `at` ends; None while it is open, -1 where it cannot be one."""
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
    """The JSON object at `at` and where the markers behind it end; None while open, -1 where there is none."""
    end = object_end(text, at)
    if end is None:
        return None
    body = text[at : max(at, end)]
    for marker in tail if end > 0 else ():
        found = follows(text, end, marker)
        if not found:
            return None if found is None else ("", -1)
        end = past(text, end, marker)
    return body, end


def decode_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the text is, or None."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def call_of(name: Any, arguments: Any, *, id: str = "") -> ParsedCall | None:
    """The call, if these are a name and an object that can be written down."""
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
    """The call in an object that holds name and arguments (Llama calls them parameters)."""
    value = decode_object(text) or {}
    id = value.get("id")
    arguments = value.get("arguments", value.get("parameters"))
    return call_of(value.get("name"), arguments, id=id if isinstance(id, str) else "")
