"""Where a recorded turn stands in a rendered prompt: its slot, found by placeholders instead of its own words.

A turn is rendered with a placeholder for its reasoning, its content and each call's arguments, so that no template can
reshape, split or drop what the model wrote without showing it. The slot is what the template writes between the text
that the turn was sampled from and the token that ends a turn. It counts when it reads, in the model's format or the
template's, as exactly these placeholders, or when it is what the turn looks like as the answer to a first message. Then
the sampled text may stand in its place. Left out: templates that repeat a turn's words outside of the turn.
"""

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from proxy.call import meaning
from proxy.parsing.formats import Format, Schemas
from proxy.parsing.turn_parser import ParsedCall, Reasoning, Text, TurnParser
from proxy.prompt.template import ChatTemplate, TemplateError

MARK = f"blackforge{uuid4().hex}"
"""Begins every placeholder. Of letters and digits, so that no template escapes, strips or splits it. Never leaves."""


@dataclass(frozen=True)
class Mask:
    """A turn in placeholders. `name` is the turn's own part of them."""

    message: dict[str, Any]
    shown: dict[str, Any]
    """A message that means what its slot must say."""
    marks: tuple[str, ...]


def mask(name: str, message: dict[str, Any], reasoning: bool, template: ChatTemplate) -> Mask:
    """The message with placeholders for what it says. `reasoning`: and for reasoning, whether it has any or not."""
    thought, said = f"{MARK}{name}r", f"{MARK}{name}c"
    calls = message.get("tool_calls") or ()
    content = said if message.get("content") or not calls else message.get("content")
    masked = {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": content}
    if calls:
        masked["tool_calls"] = [_masked_call(call, f"{MARK}{name}a{number}x") for number, call in enumerate(calls)]
    shown = masked | {"reasoning_content": thought} if reasoning else masked
    if reasoning and template.takes_reasoning:
        masked = shown
    elif reasoning:
        begin, end = template.form.think
        masked = {**masked, "content": f"{begin}{thought}{end}{content or ''}"}
    marks = [thought] * reasoning + [said] * (content == said)
    return Mask(masked, shown, (*marks, *(f"{MARK}{name}a{number}x" for number in range(len(calls)))))


def _masked_call(call: dict[str, Any], mark: str) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": {"value": mark}}}


def find(text: str, start: int, masked: Mask, opened: bool, template: ChatTemplate) -> int | None:
    """Where the slot that begins at `start` ends; None when the template does not show the turn as it was sampled.

    `opened`: the text before the slot has opened the reasoning.
    """
    last = start
    for found in masked.marks:
        at = text.find(found, start)
        if at < 0:
            return None
        last = max(last, at + len(found))
    end = template.any_end.search(text, last)
    if end is None:
        return None
    calls = masked.message.get("tool_calls")
    tools, slot = Schemas(calls) if calls else None, text[start : end.start()]
    said = meaning(masked.shown)
    shown = any(read(form, slot, tools, opened) == said for form in {template.form, template.written})
    return end.start() if shown or slot == _alone(masked, template) else None


def _alone(masked: Mask, template: ChatTemplate) -> str | None:
    """The turn's slot where it answers a first message: the measure for templates that no format of ours can read."""
    asked = [{"role": "user", "content": "x"}]
    try:
        before, text = template.render(asked, ()), template.render([*asked, masked.message], ())
    except TemplateError:
        return None
    end = template.any_end.search(text, len(before))
    return text[len(before) : end.start()] if end and text.startswith(before) else None


def read(form: Format, text: str, tools: Schemas | None, opened: bool) -> tuple[Any, ...]:
    """The meaning of a turn's text."""
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
