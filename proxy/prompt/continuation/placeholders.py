"""Where a recorded turn stands in a rendered prompt: its slot, found by placeholders instead of its own words.

A turn is rendered with a placeholder for its reasoning, its content and each call's arguments, so that a template
cannot reshape, split or drop what the model wrote unnoticed. The slot is what the template writes between the text that
the turn was sampled from and the token that ends a turn. The sampled text may stand there when the slot reads, in the
model's format or the template's, as exactly these placeholders, or equals the turn rendered as the answer to a first
message. Left out: templates that repeat a turn's words outside of the turn.
"""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from proxy.parsing.formats import Format, ToolSchemas
from proxy.parsing.turn_parser import ParsedCall, Reasoning, Text, TurnParser
from proxy.prompt.continuation.meaning import meaning
from proxy.prompt.template import ChatTemplate, TemplateError

MARK = f"blackforge{uuid4().hex}"
"""Begins every placeholder. Letters and digits only, so that no template escapes, strips or splits it. Never sent."""


@dataclass(frozen=True)
class MaskedTurn:
    """A turn whose texts are placeholders."""

    message: dict[str, Any]
    """What is rendered."""
    expected: dict[str, Any]
    """A message with the meaning that the slot must have."""
    placeholders: tuple[str, ...]


def mask(name: str, message: dict[str, Any], reasoning: bool, template: ChatTemplate) -> MaskedTurn:
    """Replace what a turn says by placeholders that begin with `name`; if `reasoning`, add one for its reasoning."""
    thought, text = f"{MARK}{name}r", f"{MARK}{name}c"
    calls = message.get("tool_calls") or ()
    content = text if message.get("content") or not calls else message.get("content")
    arguments = [f"{MARK}{name}a{number}x" for number in range(len(calls))]
    masked = {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": content}
    if calls:
        masked["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": {"value": placeholder}}}
            for call, placeholder in zip(calls, arguments, strict=True)
        ]
    expected = masked | {"reasoning_content": thought} if reasoning else masked
    if reasoning and template.takes_reasoning:
        masked = expected
    elif reasoning:
        begin, end = template.form.think
        masked = {**masked, "content": f"{begin}{thought}{end}{content or ''}"}
    return MaskedTurn(masked, expected, (*[thought] * reasoning, *[text] * (content == text), *arguments))


def find_slot_end(text: str, start: int, masked: MaskedTurn, opened: bool, template: ChatTemplate) -> int | None:
    """Where the slot that begins at `start` ends; None when the template does not show the turn as it was sampled.

    `opened`: the text before the slot has opened the reasoning.
    """
    last = start
    for placeholder in masked.placeholders:
        at = text.find(placeholder, start)
        if at < 0:
            return None
        last = max(last, at + len(placeholder))
    end = template.any_end.search(text, last)
    if end is None:
        return None
    calls = masked.message.get("tool_calls")
    tools, slot = ToolSchemas(calls) if calls else None, text[start : end.start()]
    expected = meaning(masked.expected)
    formats = {template.form, template.written}
    shown = any(parsed_meaning(form, slot, tools, opened) == expected for form in formats)
    return end.start() if shown or slot == _slot_of_first_answer(masked, template) else None


def _slot_of_first_answer(masked: MaskedTurn, template: ChatTemplate) -> str | None:
    """The turn's slot where it answers a first message: the measure for templates that no format of ours can read."""
    messages = [{"role": "user", "content": "x"}]
    try:
        before, text = template.render(messages, ()), template.render([*messages, masked.message], ())
    except TemplateError:
        return None
    end = template.any_end.search(text, len(before))
    return text[len(before) : end.start()] if end and text.startswith(before) else None


def parsed_meaning(form: Format, text: str, tools: ToolSchemas | None, opened: bool) -> tuple[Any, ...]:
    """What a turn's text says when it is parsed in this format."""
    parser = TurnParser(form, tools=tools, reasoning=opened)
    pieces = [*parser.feed(text), *parser.finish()]
    return meaning(
        {
            "content": "".join(piece.text for piece in pieces if isinstance(piece, Text)),
            "reasoning_content": "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
            "tool_calls": [
                {"name": piece.name, "arguments": piece.arguments} for piece in pieces if isinstance(piece, ParsedCall)
            ],
        }
    )
