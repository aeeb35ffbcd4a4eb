"""Formats with a tag per argument: Qwen3-Coder, GLM-4.5 and later, MiniMax-M2, DeepSeek-V3.2.

Values are bare text between tags; nothing in them is escaped. A value ends at the closing tag before the next argument
or the end of the call, so it may contain closing tags (source code, web pages). Only a value that contains text like
the rest of a whole call is read wrongly.
"""

import re
from typing import Any

from proxy.parsing.formats.base import NO_CALL, THINK, Format, Reading, call_of, decode_object, follows
from proxy.parsing.formats.schemas import ANY, ToolSchemas, typed

MAX_TAILS = 32
"""Ends of calls that a value may contain before the call counts as broken."""


class Tagged(Format):
    """A head with the tool's name, arguments with name and value, and a tail."""

    starts = ""
    """Text that follows the marker of every call; empty if there is none."""
    head: re.Pattern[str]
    argument: re.Pattern[str]
    """An argument from its opening to its closing tag; groups `key` and `value`."""
    key: re.Pattern[str]
    """An argument's opening tag."""
    tail: re.Pattern[str]

    def __init__(self, think: tuple[str, str] = THINK):
        super().__init__(think)
        marks = [re.escape(mark) for mark in (self.section, self.call) if mark]
        self._next = re.compile(rf"\s*(?:{re.escape(self.section_end)})?\s*(?:{'|'.join(marks)})")
        self._argument = re.compile(rf"\s*{self.argument.pattern}(?=\s*(?:{self.key.pattern}|\Z))", re.DOTALL)

    def read(self, text: str, tools: ToolSchemas) -> Reading | None:
        start = self.call_start(text)
        if start is None or start < 0:
            return None if start is None else NO_CALL
        if follows(text, start + len(self.call), self.starts) is False:
            return NO_CALL
        head = self.head.match(text, start)
        if head is None:
            return NO_CALL if self.tail.search(text, start) else None
        return self._close(text, head, tools, goes_on=start > 0)

    def _close(self, text: str, head: re.Match[str], tools: ToolSchemas, goes_on: bool) -> Reading | None:
        """Read the call up to the first tail that leaves no value open."""
        for number, tail in enumerate(self.tail.finditer(text, head.end())):
            body = text[head.end() : tail.start()]
            arguments, value_is_open = self._arguments(head["name"], body, tools)
            if arguments is not None:
                call = call_of(head["name"], arguments)
                return Reading(tail.end(), call, goes_on) if call else NO_CALL
            next_begins = self._next.match(text, tail.end())  # then this call is broken and ends here
            if not value_is_open or next_begins or number >= MAX_TAILS:
                return NO_CALL
        return None

    def _arguments(self, name: str, body: str, tools: ToolSchemas) -> tuple[dict[str, Any] | None, bool]:
        """The arguments in the body; without them (None), whether a value has begun and not ended."""
        at, fields = 0, {}
        while body[at:].strip():
            field = self._argument.match(body, at)
            if field is None:
                return None, self.key.match(body[at:].lstrip()) is not None
            fields[field["key"].strip()] = self.value(name, field, tools)
            at = field.end()
        return fields, False

    def value(self, name: str, field: re.Match[str], tools: ToolSchemas) -> Any:
        """The value that an argument's text means."""
        return tools.value(name.strip(), field["key"].strip(), field["value"], False)


class Qwen3Coder(Tagged):
    """`<function=name>` in `<tool_call>`, arguments in `<parameter=key>`, their values on lines of their own."""

    call, starts = "<tool_call>", "<function="
    openers = (call,)
    opening = ("<tool_call>\n<function=", ">\n")
    ends = ("</tool_call>",)
    head = re.compile(r"<tool_call>\s*<function=(?P<name>[^<>\n]+)>")
    key = re.compile(r"<parameter=[^<>\n]+>")
    argument = re.compile(r"<parameter=(?P<key>[^<>\n]+)>\n?(?P<value>.*?)\n?</parameter>")
    tail = re.compile(r"</function>\s*</tool_call>")


class Glm(Tagged):
    """The name behind `<tool_call>`, then alternating `<arg_key>` and `<arg_value>`; GLM-4.7 omits the line breaks."""

    call = "<tool_call>"
    openers = (call,)
    opening = (call, "\n<arg_key>")
    ends = ("</tool_call>",)
    head = re.compile(r"<tool_call>\s*(?P<name>[^\s<>{}]+)\s*(?=<arg_key>|</tool_call>)")
    key = re.compile(r"<arg_key>")
    argument = re.compile(r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>")
    tail = re.compile(r"</tool_call>")
    _prose = re.compile(r"<tool_call>\s*[^\s<>{}]+\s+[^\s<]|<tool_call>\s*[<>{}]")

    def read(self, text: str, tools: ToolSchemas) -> Reading | None:
        return NO_CALL if self._prose.match(text) else super().read(text, tools)

    def value(self, name: str, field: re.Match[str], tools: ToolSchemas) -> Any:
        return tools.value(name.strip(), field["key"].strip(), field["value"], True)


class MiniMaxM2(Tagged):
    """`<invoke name="...">` for each call of a section, arguments in `<parameter name="...">`."""

    section, section_end = "<minimax:tool_call>", "</minimax:tool_call>"
    call = '<invoke name="'
    openers = (section,)
    opening = (f"{section}\n{call}", '">\n')
    inside = (call,)
    ends = ("</invoke>",)
    head = re.compile(r'<invoke name="(?P<name>[^"<>\n]+)">')
    key = re.compile(r'<parameter name="[^"<>\n]+">')
    argument = re.compile(r'<parameter name="(?P<key>[^"<>\n]+)">(?P<value>.*?)</parameter>')
    tail = re.compile(r"</invoke>")


class DeepSeekV32(Tagged):
    """Like MiniMax-M2 with `｜DSML｜` in the tags; a tag tells whether its value is a string. JSON is read as well."""

    section, section_end = "<｜DSML｜function_calls>", "</｜DSML｜function_calls>"
    call = "<｜DSML｜invoke"
    openers = (section, call)
    opening = (f'{section}\n{call} name="', '">\n')
    inside = (call,)
    ends = ("</｜DSML｜invoke>",)
    head = re.compile(r'<｜DSML｜invoke\s+name="(?P<name>[^"<>\n]+)"\s*>')
    key = re.compile(r'<｜DSML｜parameter\s+name="[^"<>\n]+"\s+string="(?:true|false)"\s*>')
    argument = re.compile(
        r'<｜DSML｜parameter\s+name="(?P<key>[^"<>\n]+)"\s+string="(?P<string>true|false)"\s*>'
        r"(?P<value>.*?)</｜DSML｜parameter>"
    )
    tail = re.compile(r"</｜DSML｜invoke>")

    def _arguments(self, name: str, body: str, tools: ToolSchemas) -> tuple[dict[str, Any] | None, bool]:
        if body.lstrip().startswith("{"):
            arguments = decode_object(body.strip())
            return arguments, arguments is None
        return super()._arguments(name, body, tools)

    def value(self, name: str, field: re.Match[str], tools: ToolSchemas) -> Any:
        return field["value"] if field["string"] == "true" else typed(field["value"], ANY)
