"""Formats with a JSON object per call, in sections between markers that are single tokens: DeepSeek-V3, V3.1, Kimi-K2.

A call outside of a section is read as well, because models sometimes leave the section's marker out.
"""

import re
from collections.abc import Collection, Sequence

from proxy.parsing.formats.base import NO_CALL, Format, ParsedCall, Reading, call_of, decode_object, enclosed
from proxy.parsing.formats.schemas import ToolSchemas


class Sections(Format):
    """A section of calls; each call is a head, a JSON object and a tail."""

    head: re.Pattern[str]
    """The text before the object, from the call's marker on; its group `name` is the tool."""
    tail: tuple[str, ...] = ()
    """Markers behind the object."""

    def read(self, text: str, tools: ToolSchemas) -> Reading | None:
        start = self.call_start(text)
        if start is None or start < 0:
            return None if start is None else NO_CALL
        head = self.head.match(text, start)
        if head is None:
            return NO_CALL if self.call in text[start + len(self.call) :] or self.ends[0] in text else None
        body = enclosed(text, head.end(), self.tail)
        if body is None:
            return None
        call = call_of(head["name"], decode_object(body[0]), id=head.groupdict().get("id") or "")
        return Reading(body[1], call, goes_on=start > 0) if call else NO_CALL


class DeepSeekV31(Sections):
    """`<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`."""

    section, section_end = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
    call = "<｜tool▁call▁begin｜>"
    openers = (section, call)
    inside = (call,)
    ends = ("<｜tool▁call▁end｜>",)
    tail: tuple[str, ...] = ends
    opening = (section + call, "<｜tool▁sep｜>{")
    head = re.compile(call + r"(?P<name>[^<\n]+)<｜tool▁sep｜>")


class DeepSeekV3(DeepSeekV31):
    """Like V3.1, with the call's type before the separator and the object in a fenced block behind the name."""

    tail = ("```", "<｜tool▁call▁end｜>")
    opening = (f"{DeepSeekV31.opening[0]}function<｜tool▁sep｜>", "\n```json\n")
    head = re.compile(DeepSeekV31.call + r"[^<\n]*<｜tool▁sep｜>(?P<name>[^<\n]+)\n```json\n")


class KimiK2(Sections):
    """`<|tool_call_begin|>functions.name:3<|tool_call_argument_begin|>{...}<|tool_call_end|>`."""

    section, section_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call = "<|tool_call_begin|>"
    openers = (section, call)
    inside = (call,)
    ends = ("<|tool_call_end|>",)
    tail = ends
    opening = (f"{section}{call}functions.", ":0<|tool_call_argument_begin|>")
    head = re.compile(
        re.escape(call)
        + r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<|:]+):\d+)\s*"
        + re.escape("<|tool_call_argument_begin|>")
    )

    def ids(self, calls: Sequence[ParsedCall], taken: Collection[str]) -> list[str]:
        """The model's own ids, which the template writes into prompts; a taken one gets the next free number."""
        given: list[str] = []
        for call in calls:
            id, number = call.id, 0
            while id in taken or id in given:
                id, number = f"functions.{call.name}:{number}", number + 1
            given.append(id)
        return given

    def lasting_ids(self, names: Sequence[str], taken: Collection[str]) -> list[str]:
        """Ids as the model writes them."""
        return self.ids([ParsedCall(name, "{}") for name in names], {*taken, ""})
