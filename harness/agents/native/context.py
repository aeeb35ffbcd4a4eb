"""The messages of one conversation, and what was dropped of it.

A request holds the system prompt, the task with the agent's plan and notes, and the turns since the last compaction.
How many tokens a request had, the model's usage says. What has been added since is estimated by its pieces.
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from .model import Answer, Message

PLAN = "Your plan:"
NOTES = "Your notes on the turns so far, which are not shown any more:"
PIECE = re.compile(r"[^\W\d_]{1,6}|\d|[^\w\s]|_")
"""About a token: a part of a word, a digit, a sign."""
AROUND = 8
"""About the tokens that templates put around a message or a call."""


class Results:
    """The results of all tool calls of a rollout, by id. Nothing is dropped here, so that any can be recalled."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def keep(self, text: str) -> str:
        """Keep a result and return its id."""
        self._texts.append(text)
        return f"r{len(self._texts)}"

    def get(self, id: str) -> str | None:
        number = id.removeprefix("r")
        known = number.isascii() and number.isdigit() and 1 <= int(number) <= len(self._texts)
        return self._texts[int(number) - 1] if known else None


@dataclass
class _Result:
    id: str
    call: str
    """The id of the tool call that it answers."""
    text: str
    dropped: bool = False

    @property
    def mark(self) -> str:
        """What stands in its place when it is dropped."""
        return f"[{self.id}: dropped]"

    def message(self) -> Message:
        return {"role": "tool", "tool_call_id": self.call, "content": self.mark if self.dropped else self.text}


@dataclass
class _Turn:
    reply: Message
    results: list[_Result] = field(default_factory=list)

    def messages(self) -> list[Message]:
        return [self.reply, *(result.message() for result in self.results)]


@dataclass(frozen=True)
class Dropped:
    """What an action took out of a context."""

    how: str
    results: tuple[str, ...]
    """Ids of the results that the next request does not show any more."""
    characters: int
    """How much shorter the next request is."""


class Context:
    """One conversation: `main`, or a branch of it."""

    def __init__(self, branch: str, system: str, task: str, results: Results, *, recallable: bool = False):
        """`recallable`: whether dropped results are named, so that the model may recall them."""
        self.branch = branch
        self.plan = ""
        self.returned: str | None = None
        """The message with which the model has ended the conversation."""
        self.fresh = True
        """Whether the model has taken no turn yet."""
        self.full = False
        """Whether the last request, or the answer to it, met the end of the context."""
        self._system, self._task, self._store, self._recallable = system, task, results, recallable
        self._measured = 0, 0
        self._notes: str | None = None
        self._lost: list[str] = []
        """Ids of the results of compacted turns."""
        self._turns: list[_Turn] = []

    @property
    def turns(self) -> int:
        """The number of turns that a request shows."""
        return len(self._turns)

    def messages(self) -> list[Message]:
        """The messages of the next request."""
        parts = [self._task]
        if self.plan and self._notes is not None:  # before a compaction the plan stands in the call that made it
            parts.append(f"{PLAN}\n{self.plan}")
        if self._notes is not None:
            parts.append(f"{NOTES}\n{self._notes}")
        if self._lost and self._recallable:
            parts.append(f"Results {', '.join(self._lost)} were dropped; recall shows one again.")
        turns = [message for turn in self._turns for message in turn.messages()]
        first = [{"role": "system", "content": self._system}, {"role": "user", "content": "\n\n".join(parts)}]
        return [*first, *turns]

    def characters(self) -> int:
        return len(json.dumps(self.messages(), ensure_ascii=False))

    def measure(self, messages: list[Message], tokens: int) -> None:
        """Take note of how many tokens a request of these messages had."""
        self._measured = tokens, _pieces(messages)

    def tokens(self) -> int:
        """About how many tokens the next request has: those of the last one, and the pieces that have come or gone."""
        tokens, pieces = self._measured
        return tokens + _pieces(self.messages()) - pieces

    def add_reply(self, answer: Answer) -> None:
        self.fresh = False
        self._turns.append(_Turn(answer.message))

    def add_result(self, call: str, text: str) -> None:
        """Add the result of a call of the last turn."""
        self._turns[-1].results.append(_Result(self._store.keep(text), call, text))

    def compact(self, notes: str) -> Dropped:
        """Put notes in the place of all turns."""
        before = self.characters()
        gone = [result.id for turn in self._turns for result in turn.results]
        self._lost += gone
        self._notes, self._turns, self.full = notes.strip() or "(none)", [], False
        return Dropped("compact", tuple(gone), before - self.characters())

    def discard(self, keep_last: int) -> Dropped:
        """Drop the tool results of all turns but the last ones; replies stay with their reasoning."""
        before = self.characters()
        older = [result for turn in self._turns[: max(0, len(self._turns) - keep_last)] for result in turn.results]
        gone = [result for result in older if not result.dropped and len(result.text) > len(result.mark)]
        for result in gone:
            result.dropped = True
        return Dropped("discard", tuple(result.id for result in gone), before - self.characters())

    def drop_last_turn(self) -> Dropped:
        """Drop the last turn, which is too long for any further request."""
        before = self.characters()
        gone = [result.id for result in self._turns.pop().results]
        self._lost += gone
        return Dropped("drop", tuple(gone), before - self.characters())


def _pieces(messages: list[Message]) -> int:
    """The pieces of what a template shows of the messages, and those that it puts around each."""
    texts = [message.get(key) or "" for message in messages for key in ("content", "reasoning_content")]
    functions = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    texts += [text for function in functions for text in function.values()]
    return sum(len(PIECE.findall(text)) for text in texts) + AROUND * (len(messages) + len(functions))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def with_text(messages: list[Message], text: str) -> list[Message]:
    """The messages with a text behind the last one, which is the user's: some templates allow no two in a row."""
    last: dict[str, Any] = {**messages[-1], "content": f"{messages[-1]['content']}\n\n{text}"}
    return [*messages[:-1], last]
