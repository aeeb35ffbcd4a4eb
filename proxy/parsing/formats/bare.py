"""Formats in which a call ends with its JSON, without a marker: Llama-3 and Mistral."""

import re
import uuid
from collections.abc import Collection, Sequence

from proxy.parsing.formats.base import (
    NO_CALL,
    Format,
    ParsedCall,
    Reading,
    call_of,
    decode_object,
    enclosed,
    named_object,
)
from proxy.parsing.formats.schemas import ToolSchemas


class Llama3(Format):
    """`{"name": ..., "parameters": {...}}` behind `<|python_tag|>`, or at the beginning of the text.

    Without the tag, it is a call only if it names a known tool. More calls follow after white space or a semicolon.
    """

    tag = "<|python_tag|>"
    openers = (tag,)
    at_start = ("{",)
    inside = (";", "{")
    opening = ('{"name": "', '", "parameters": ')
    written = ('{"name": ', ', "parameters": ', "}")

    def read(self, text: str, tools: ToolSchemas) -> Reading | None:
        start = next((len(mark) for mark in (self.tag, ";") if text.startswith(mark)), 0)
        body = enclosed(text, start, ())
        if body is None:
            return None
        call = named_object(body[0])
        if call is None or not (text.startswith(self.tag) or tools.knows(call.name)):
            return NO_CALL
        return Reading(body[1], call, goes_on=True)


class Mistral(Format):
    """`[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    marker = "[TOOL_CALLS]"
    openers = (marker,)
    inside = (",",)
    section_end = "]"
    opening = (f'{marker} [{{"name": "', '", "arguments": ')
    _list = re.compile(r"\[TOOL_CALLS\]\s*\[|,")
    _compact = re.compile(r"\[TOOL_CALLS\]\s*(?P<name>[^\s\[\]{}]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]")

    def read(self, text: str, tools: ToolSchemas) -> Reading | None:
        compact = self._compact.match(text)
        head = compact or self._list.match(text)
        body = enclosed(text, head.end(), ()) if head else None
        if body is None or head is None:
            return NO_CALL if head is None and self._is_prose(text) else None
        if compact:
            call = call_of(compact["name"], decode_object(body[0]), id=compact["id"] or "")
        else:
            call = named_object(body[0])
        return Reading(body[1], call, goes_on=not compact) if call else NO_CALL

    def _is_prose(self, text: str) -> bool:
        """Whether the text behind the marker can no longer become a name and its arguments."""
        return re.search(r"[\s{}]", text[len(self.marker) :].strip()) is not None

    def ids(self, calls: Sequence[ParsedCall], taken: Collection[str]) -> list[str]:
        """Ids of nine letters and digits; Mistral's templates refuse others."""
        return [call.id if re.fullmatch(r"[a-zA-Z0-9]{9}", call.id) else uuid.uuid4().hex[:9] for call in calls]
