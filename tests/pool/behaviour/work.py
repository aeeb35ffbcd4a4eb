"""An agent's work, turn by turn: what it says, what its tools answer, and the rows that the gateway would keep."""

import json
from dataclasses import dataclass, field
from typing import Any

from proxy.augment.prompt_view import PromptView
from proxy.call import Call, Reply, ToolCall
from proxy.dialects.base import parsed_arguments, tool_call, tool_definition
from proxy.parsing.formats import FORMATS
from proxy.pool.behaviour.event import Event
from proxy.pool.behaviour.read import events
from proxy.pool.completions.observed import Observed, pack, unpack
from proxy.pool.completions.records import RequestShape
from proxy.recording.observing import observed

FORM = FORMATS["qwen"]()
TASK = "Mend the parser, and see that the tests pass."


def schema(*names: str) -> dict[str, Any]:
    """Parameters that are texts and all required."""
    return {"type": "object", "properties": {name: {"type": "string"} for name in names}, "required": list(names)}


TOOLS = tuple(
    tool_definition(name, None, schema(*names))
    for name, names in {
        "bash": ("command",),
        "edit": ("filePath", "oldString", "newString"),
        "write": ("filePath", "content"),
        "read": ("filePath",),
        "grep": ("pattern",),
        "webfetch": ("url",),
    }.items()
)


@dataclass(frozen=True)
class Row:
    """A completion, as far as events look at it."""

    id: int
    follows: int | None
    finish_reason: str
    reply: dict[str, Any]
    observed: Observed | None
    shape: RequestShape | None = None
    label: str | None = "main"


@dataclass(frozen=True)
class Failed:
    """A result that the agent flags as an error."""

    text: str


Answer = str | Failed | None
Use = tuple[str, dict[str, str] | str, Answer]
"""A tool, its arguments (a text: as the model wrote them), and its result; None: it is not shown."""


@dataclass
class Work:
    """The turns of one conversation. `rows` are as they come back from the pool."""

    task: str = TASK
    rows: list[Row] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages.append({"role": "user", "content": self.task})

    def turn(self, *uses: Use, text: str = "", reasoning: str = "", finish: str = "", label: str = "main") -> "Work":
        """One turn that uses these tools, and their results in the next request."""
        calls = tuple(
            ToolCall(f"call_{len(self.rows)}_{i}", name, value if isinstance(value, str) else json.dumps(value))
            for i, (name, value, _) in enumerate(uses)
        )
        finish = finish or ("tool_calls" if uses else "stop")
        reply = Reply(
            content=text, reasoning=reasoning, tool_calls=calls, finish_reason=finish, stop_sequence=None,
            prompt_tokens=1, sampled_tokens=1, cached_tokens=0,
        )  # fmt: skip
        kept = observed(Call(model="m", messages=tuple(self.messages), tools=TOOLS), reply, FORM, PromptView(None))
        follows = self.rows[-1].id if self.rows else None
        kept = None if kept is None else unpack(pack(kept))
        self.rows.append(Row(len(self.rows) + 1, follows, reply.finish_reason, reply.message(), kept, label=label))
        echoed = [tool_call(call.id, call.name, parsed_arguments(call.arguments)) for call in calls]
        self.messages.append({"role": "assistant", "content": text} | ({"tool_calls": echoed} if echoed else {}))
        for call, (_, _, answer) in zip(calls, uses, strict=True):
            if answer is not None:
                failed = isinstance(answer, Failed)
                text = answer.text if isinstance(answer, Failed) else answer
                result = {"role": "tool", "tool_call_id": call.id, "content": text}
                self.messages.append(result | ({"is_error": True} if failed else {}))
        return self

    def shell(self, *commands: str, answer: Answer = "") -> "Work":
        """One turn for each of these commands, all with this result."""
        for command in commands:
            self.turn(("bash", {"command": command}, answer))
        return self

    def says(self, text: str) -> "Work":
        """A message of the user."""
        self.messages.append({"role": "user", "content": text})
        return self

    def done(self, text: str = "All tests pass now.", **more: Any) -> "Work":
        """The last turn, without a call."""
        return self.turn(text=text, **more)

    def events(self, kind: str) -> list[Event]:
        return [event for event in events(self.rows) if event.kind == kind]


def edit(file: str, old: str, new: str) -> Use:
    return "edit", {"filePath": file, "oldString": old, "newString": new}, "Edit applied successfully."


def write(file: str, content: str) -> Use:
    return "write", {"filePath": file, "content": content}, "Wrote file successfully."
