"""What a chat template writes between two messages, learned by rendering short conversations of made-up words.

A prompt can be read back by it: it is a separator, a message, a separator, a message, up to where the model begins to
answer. Left out: templates that repeat a message elsewhere; their prompts stay text.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from proxy.prompt.template import THINKING, ChatTemplate, TemplateError

START, ANSWER = "start", "answer"
"""The places before the first message and behind the last one."""
MARK = "blackforgeword{}x"
"""A word that no template contains, changes or cuts."""
ROLES = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}
"""Letter -> role; c is an assistant's turn that only calls."""
CONVERSATIONS = (
    "u", "su", "uu", "uau", "uaua", "sua", "suau", "uaau", "uas", "usu", "ua", "a", "sa",
    "uct", "uctt", "ucttu", "ucta", "ucttau", "uctct", "suct", "ucts", "uat", "uatu", "uata",
)  # fmt: skip
THOUGHTS: tuple[dict[str, Any], ...] = ({}, {THINKING: False}, {THINKING: True})
CALL_ID, ANY_ID = "a1b2c3d4e", r"[\w.:-]{1,200}"
"""The made-up id of calls, and what stands for it in a separator that repeats it."""
LINES, ESCAPED = 'blackforgeline\n"x', 'blackforgeline\\n\\"x'


@dataclass(frozen=True)
class PromptPart:
    """A message as it stands in a prompt."""

    role: str
    text: str


class Separators:
    """The separators of one template. `dated`: arguments that the template needs for the current date."""

    def __init__(self, template: ChatTemplate, dated: dict[str, Any]):
        self._template, self._dated = template, dated
        self._behind: dict[str, dict[str, str]] = defaultdict(dict)
        """Place -> separator -> the place behind it; the first one that is found counts."""
        self._answers: dict[str, set[str]] = defaultdict(set)
        """Place -> separators behind which the model answers."""
        for letters in CONVERSATIONS:
            if "s" in letters[1:] and not template.keeps_later_system:
                continue  # such a message reads as its neighbour's text or a user's, and its separator is no mark
            for thought in THOUGHTS:
                self._learn(letters, thought)
        self.escapes_results = (
            self._rendered([*_messages("uc"), {**_messages("t")[0], "content": LINES}]).count(ESCAPED) == 1
        )
        """Whether the template writes a tool's result as a JSON string."""

    def split(self, text: str, place: str = START) -> list[PromptPart] | None:
        """Return the messages of a prompt that begins at this place; None where it is none of this template's.

        From an assistant's place the text begins with what ends that turn.
        """
        parts: list[PromptPart] = []
        at = 0
        while place != ANSWER:
            found = self._patterns[place].find(text, at) if place in self._patterns else None
            if found is None:
                return None
            behind, start, end = found
            if at:
                parts.append(PromptPart(place, text[at:start]))
            place, at = behind, end
        swallowed = any(self._template.any_end.search(part.text) for part in parts)  # a turn that was not told apart
        return None if swallowed else parts

    @cached_property
    def _patterns(self) -> "dict[str, _Pattern]":
        places = {*self._behind, *self._answers}
        return {place: _Pattern(self._answers[place], self._behind[place]) for place in places}

    def _learn(self, letters: str, thought: dict[str, Any]) -> None:
        """Learn from one conversation, if the template takes it."""
        places = [START, *(ROLES[letter] for letter in letters), ANSWER]
        for at, gap in enumerate(self._gaps(letters, thought)):
            before, behind = places[at], places[at + 1]
            if letters[at - 1 : at] == "c":
                gap = self._behind_call(letters[:at], gap)
            if letters[at : at + 1] == "c" or not gap:
                continue
            if behind == ANSWER:
                self._answers[before].add(gap)
            else:
                self._behind[before].setdefault(gap, behind)

    def _gaps(self, letters: str, thought: dict[str, Any]) -> list[str]:
        """Return what stands before, between and behind the words of a conversation; nothing where it is refused."""
        words = [MARK.format(number) for number in range(len(letters))]
        text = self._rendered(_messages(letters), **thought)
        starts = [text.find(word) for word in words]
        if any(text.count(word) != 1 for word in words) or starts != sorted(starts):
            return []
        ends = [0, *(start + len(word) for start, word in zip(starts, words, strict=True))]
        return [text[end:start] for end, start in zip(ends, [*starts, len(text)], strict=True)]

    def _rendered(self, messages: list[dict[str, Any]], **thought: Any) -> str:
        """Render a conversation; nothing where the template refuses it."""
        try:
            return self._template.render(messages, (), **self._dated, **thought)
        except TemplateError:
            return ""

    def _behind_call(self, letters: str, gap: str) -> str:
        """Return the part of a gap that is not the end of a call: the call ends alike before any message."""
        for end in sorted(self._separators("assistant", "user"), key=len, reverse=True):
            gaps = self._gaps(f"{letters}u", {})
            if gaps and gaps[-2].endswith(end) and gap.startswith(rest := gaps[-2].removesuffix(end)):
                return gap.removeprefix(rest)
        found = self._template.any_end.search(gap)
        return "" if found is None else gap[found.start() :]

    def _separators(self, before: str, behind: str) -> list[str]:
        return [text for text, place in self._behind[before].items() if place == behind]


class _Pattern:
    """Finds the first separator, the longest of several. One behind which the model answers stands at the end."""

    def __init__(self, answers: set[str], others: dict[str, str]):
        self._behind: list[str] = []
        groups = []
        for text in sorted({*answers, *others}, key=len, reverse=True):
            form = re.escape(text).replace(CALL_ID, ANY_ID)
            for place, end in ((ANSWER, r"\Z"), (others.get(text), "")):
                if place is not None and (place != ANSWER or text in answers):
                    groups.append(f"({form}){end}")
                    self._behind.append(place)
        self._pattern = re.compile("|".join(groups) or "(?!)")

    def find(self, text: str, at: int) -> "tuple[str, int, int] | None":
        """Return the place behind the next separator, and where that one begins and ends. At 0 it has to begin."""
        found = self._pattern.search(text, at) if at else self._pattern.match(text)
        if found is None:
            return None
        return self._behind[(found.lastindex or 1) - 1], found.start(), found.end()


def _messages(letters: str) -> list[dict[str, Any]]:
    return [_message(letter, MARK.format(number)) for number, letter in enumerate(letters)]


def _message(letter: str, word: str) -> dict[str, Any]:
    if letter == "c":
        function = {"name": "look", "arguments": {"at": word}}
        call = {"id": CALL_ID, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    named = {"tool_call_id": CALL_ID, "name": "look"} if letter == "t" else {}
    return {"role": ROLES[letter], "content": word, **named}
