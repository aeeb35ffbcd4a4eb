"""Reads recorded prompts as messages: what the model saw, in the form of chat completions.

A pool keeps prompts as tokens and replies as messages. What a template drops or strips of a request is not in its
prompt, so it is not in these messages either. Ids of tool calls are in no prompt; they come from the recorded replies.
Left out: tools that a template writes otherwise than as JSON, which stay text of the system prompt.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from itertools import takewhile
from typing import Any

from proxy.parsing.formats import ToolSchemas
from proxy.parsing.turn_parser import ParsedCall, Reasoning, Text, TurnParser
from proxy.pool.traces.branches import PromptReading
from proxy.prompt.conversations.separators import PromptPart, Separators
from proxy.prompt.conversations.tool_lists import ToolLists
from proxy.prompt.template import ChatTemplate, TemplateError


class AnyTool(ToolSchemas):
    """Takes calls of every tool, for turns whose tools are not known."""

    def knows(self, tool: str) -> bool:
        return True


class TemplateReader:
    """Reads prompts that one template has rendered."""

    def __init__(self, template: ChatTemplate):
        self._template = template
        # Separators and tool lists come from renderings, which an attempt's prompts, all of one date, need once.
        self._of_date = lru_cache(maxsize=8)(self._dated)
        self.ends = frozenset(template.ends)
        """Tokens that end a turn."""

    def whole(self, tokens: Sequence[int], dated_at: float | None) -> PromptReading:
        """Read a whole prompt. `dated_at`: the unix time that the template read."""
        text = self._template.decode(tokens)
        separators, lists, dated = self._of_date(dated_at)
        for shown in lists.found_in(text):
            messages = self._messages(separators.split(shown.rest), separators)
            if messages is not None and self._is_rendered(messages, shown.tools, dated, text):
                return PromptReading(messages, shown.tools)
        messages = self._messages(separators.split(text), separators)
        if messages is None:
            return PromptReading([{"role": "user", "content": text}], raw=True)
        return PromptReading(messages, [] if self._is_rendered(messages, [], dated, text) else None)

    def added(self, tokens: Sequence[int], dated_at: float | None) -> PromptReading:
        """Read what a prompt adds to a recorded answer. It begins with the end of that turn."""
        text = self._template.decode(tokens)
        separators, _, _ = self._of_date(dated_at)
        messages = self._messages(separators.split(text, "assistant"), separators)
        if messages is None:
            return PromptReading([{"role": "user", "content": text}], raw=True)
        return PromptReading(messages)

    def _dated(self, dated_at: float | None) -> tuple[Separators, ToolLists, dict[str, Any]]:
        dated = {} if dated_at is None else {"strftime_now": datetime.fromtimestamp(dated_at).strftime}
        separators = Separators(self._template, dated)
        return separators, ToolLists(self._template, dated), dated

    def _messages(self, parts: list[PromptPart] | None, separators: Separators) -> list[dict[str, Any]] | None:
        if parts is None:
            return None
        return [self._message(part, separators) for part in parts]

    def _message(self, part: PromptPart, separators: Separators) -> dict[str, Any]:
        if part.role == "assistant":
            return self.turn(part.text)
        if part.role == "tool" and separators.escapes_results:
            try:
                return {"role": "tool", "content": json.loads(f'"{part.text}"')}
            except ValueError:
                pass  # it is no JSON string after all
        return {"role": part.role, "content": part.text}

    def turn(self, text: str) -> dict[str, Any]:
        """Read an assistant's turn: text, reasoning and calls. The calls have no ids."""
        parser = TurnParser(self._template.written, tools=AnyTool())
        pieces = [*parser.feed(text), *parser.finish()]
        content = "".join(piece.text for piece in pieces if isinstance(piece, Text))
        reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
        calls = [
            {"type": "function", "function": {"name": piece.name, "arguments": piece.arguments}}
            for piece in pieces
            if isinstance(piece, ParsedCall)
        ]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
        return (
            message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})
        )

    def _is_rendered(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], dated: dict[str, Any], text: str
    ) -> bool:
        """Whether the template begins the prompt with these tools and the messages before the first answer."""
        opening = list(takewhile(lambda message: message["role"] != "assistant", messages))
        try:
            shown = self._template.render(opening, tools, **dated, add_generation_prompt=False)
        except TemplateError:
            return False
        return text.startswith(shown)
