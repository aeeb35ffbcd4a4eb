"""The tools of a prompt, where the chat template writes each as JSON. How, is learned from two made-up tools."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from proxy.prompt.template import ChatTemplate, TemplateError

SYSTEM, USER = "blackforgesystemx", "blackforgeuserx"
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "looks", "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("blackforgeone", "blackforgetwo")
]
INDENTS: tuple[dict[str, Any], ...] = ({}, {"indent": 4}, {"indent": 2}, {"separators": (",", ":")})


@dataclass(frozen=True)
class ToolList:
    """How a template writes tools: behind `lead`, with `joint` between them and `tail` behind them."""

    lead: str
    joint: str
    tail: str
    bare: bool
    """Only the function of each is written."""

    def read(self, text: str) -> "ShownTools | None":
        """Return the tools of a prompt and the prompt without them; None where it has no such list."""
        start = text.find(self.lead)
        if start < 0:
            return None
        at, tools = start + len(self.lead), []
        while True:
            try:
                tool, at = json.JSONDecoder().raw_decode(text, at)
            except (ValueError, RecursionError):
                return None
            tools.append({"type": "function", "function": tool} if self.bare else tool)
            if text.startswith(self.tail, at):  # it may begin like what stands between two tools
                return ShownTools(tools, text[:start] + text[at + len(self.tail) :])
            if not text.startswith(self.joint, at):
                return None
            at += len(self.joint)


@dataclass(frozen=True)
class ShownTools:
    """The tools that a prompt shows, and the prompt without them."""

    tools: list[dict[str, Any]]
    rest: str


class ToolLists:
    """How one template writes tools beside a system prompt, and without one."""

    def __init__(self, template: ChatTemplate, dated: dict[str, Any]):
        self._template, self._dated = template, dated
        system, user = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": USER})
        ways = (self._learned([system, user]), self._learned([user]))
        self._lists = [way for way in ways if way is not None]

    def found_in(self, text: str) -> Iterator[ShownTools]:
        """Yield each way in which the prompt can be read as one with tools."""
        for way in self._lists:
            shown = way.read(text)
            if shown is not None:
                yield shown

    def _learned(self, messages: list[dict[str, Any]]) -> ToolList | None:
        """Compare a conversation with tools with the same one without."""
        try:
            plain = self._template.render(messages, (), **self._dated)
            shown = self._template.render(messages, TOOLS, **self._dated)
        except TemplateError:
            return None
        for bare in (False, True):
            for indent in INDENTS:
                first, second = (
                    json.dumps(tool["function"] if bare else tool, ensure_ascii=False, **indent) for tool in TOOLS
                )
                before, _, rest = shown.partition(first)
                joint, found, behind = rest.partition(second)
                if found:
                    same, also = _common(before, plain), _common(behind[::-1], plain[::-1])
                    also = min(also, len(plain) - same)
                    found_list = ToolList(before[same:], joint, behind[: len(behind) - also], bare)
                    return found_list if found_list.lead and found_list.tail else None
        return None


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with alike."""
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)
