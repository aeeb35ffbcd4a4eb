"""Qwen2.5, Qwen3 and Hermes: one JSON object between `<tool_call>` and `</tool_call>` for each call."""

from proxy.parsing.formats.base import NO_CALL, Format, Reading, enclosed, named_object
from proxy.parsing.formats.schemas import ToolSchemas

CALL, END_CALL = "<tool_call>", "</tool_call>"


class Qwen(Format):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    openers = (CALL,)
    ends = (END_CALL,)
    opening = (f'{CALL}\n{{"name": "', '", "arguments": ')
    written = (f'{CALL}\n{{"name": ', ', "arguments": ', f"}}\n{END_CALL}")

    def read(self, text: str, tools: ToolSchemas) -> Reading | None:
        body = enclosed(text, len(CALL), (END_CALL,))
        if body is None:
            return None
        call = named_object(body[0])
        return Reading(body[1], call) if call else NO_CALL
