"""Tool calls as actions: what sort of thing an agent did, with which command, to which file, and what came of it.

Tools are known by what agents call them and by the fields of their arguments. A tool that nothing is known of is an
action of the sort `other`.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar

import msgspec

from proxy.pool.behaviour.exits import frames_first
from proxy.pool.behaviour.shell import LONGEST, Command, commands
from proxy.pool.completions.labels import SIDE
from proxy.pool.completions.observed import Observed, ToolResult
from proxy.pool.completions.records import SERVED_FINISH_REASONS, RequestShape

Sort = Literal["shell", "edit", "read", "search", "web", "other"]
SORTS: tuple[tuple[Sort, str], ...] = (
    ("web", r"web|browse|fetch|http|url"),
    ("search", r"(?<!strin)grep|glob|search|find|^ls$|list_?(dir|files)"),
    (
        "edit",
        r"edit|(?<!todo)(?<!todo_)write(?!_?stdin)|patch|replace|create_?file|insert|update_?file|delete_?file|remove_?file",
    ),
    ("read", r"read|view|^cat$|open_?file|get_?file"),
    ("shell", r"bash|shell|exec|terminal|run_?(?:command|cmd|script)|^cmd$|^command$|console"),
)
PATH = ("filePath", "file_path", "path", "filename", "file", "target_file", "notebook_path", "absolute_path")
NEW = ("content", "new_string", "newString", "new_str", "file_text", "new_text", "insert_text", "code_edit", "contents")
OLD = ("old_string", "oldString", "old_str", "old_text")
SCRIPT = ("command", "cmd", "script", "code", "input")
FENCE = re.compile(r"```(?:bash|sh|shell|\w{0,40}bash\w{0,40})\n(.*?)```", re.DOTALL)
"""A command in the text of agents that have no tools."""
KEYS = re.compile(r'"keystrokes"\s*:\s*("(?:[^"\\]|\\.)*")', re.DOTALL)
"""What agents that answer in JSON, without tools, type into a terminal."""
WRITTEN = "text"
"""The tool's name in actions that are such commands."""
NESTED = 100
"""Levels of arguments that are read: deeper ones decode, but to write them again could exceed Python's recursion."""
_PATCHED = re.compile(r"^\*\*\* (?:Add|Update|Delete) File: (.+)$|^\+\+\+ (?:b/)?(\S+)", re.MULTILINE)


class Readable(Protocol):
    """What events are made from: a recorded completion."""

    @property
    def id(self) -> int: ...
    @property
    def follows(self) -> int | None: ...
    @property
    def finish_reason(self) -> str: ...
    @property
    def reply(self) -> dict[str, Any]: ...
    @property
    def shape(self) -> RequestShape | None: ...
    @property
    def label(self) -> str | None: ...
    @property
    def observed(self) -> Observed | None: ...


R = TypeVar("R", bound=Readable)


@dataclass(frozen=True)
class Action:
    """One tool call of a completion, or a command in its text."""

    completion: int
    call: int | None
    """Its place among the reply's tool calls; None: it is a command in the text."""
    tool: str
    written: str
    """Its arguments as the model wrote them, under the agent's names."""
    fault: str = ""
    """How it misses its tool, as the recording says."""
    results: tuple[ToolResult, ...] = ()
    """Its result. Where requests show different ones, each of them: whoever has the key can make one up. Empty: not
    known."""
    frames_first: bool = False
    """Whether the agent is known to print a frame with the exit code before the output of this tool."""

    @property
    def result(self) -> ToolResult | None:
        """The first of its results; None: not known."""
        return self.results[0] if self.results else None

    @cached_property
    def arguments(self) -> dict[str, Any] | None:
        """The arguments; None where they are no JSON object, or a deeply nested one."""
        if self.call is None:
            return {SCRIPT[0]: self.written}
        try:
            value = msgspec.json.decode(self.written or "{}")
        except (msgspec.DecodeError, UnicodeEncodeError, ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) and not _deeper(value, NESTED) else None

    @cached_property
    def sort(self) -> Sort:
        if self.call is None:
            return "shell"
        sort: Sort = next((sort for sort, names in SORTS if re.search(names, self.tool, re.IGNORECASE)), "other")
        viewed = sort == "edit" and self._field(SCRIPT[:3]) == "view"  # an editor that can also show
        return "read" if viewed else sort

    @cached_property
    def script(self) -> str:
        """The command line of a shell; empty for other tools."""
        if self.sort != "shell":
            return ""
        value = self._field(SCRIPT)
        if isinstance(value, list):  # codex: ["bash", "-lc", "..."]
            parts = [str(part) for part in value]
            return parts[2] if len(parts) == 3 and parts[1] in ("-c", "-lc") else " ".join(parts)
        return value if isinstance(value, str) else ""

    @cached_property
    def commands(self) -> list[Command]:
        return commands(self.script) if self.script else []

    @property
    def head(self) -> str:
        """The command that its script is about, the first that does more than change the directory."""
        heads = [command.head for command in self.commands if command.program not in ("cd", "export", "set", "source")]
        return heads[0] if heads else (self.commands[0].head if self.commands else "")

    @property
    def name(self) -> str:
        return f"{self.tool}: {self.head}" if self.head else self.tool

    @cached_property
    def path(self) -> str:
        value = self._field(PATH)
        return value if isinstance(value, str) else ""

    @cached_property
    def patch(self) -> str:
        """A patch that the call applies: to several files, in codex' form or as a diff."""
        if self.sort == "edit":
            texts = [value for value in (self.arguments or {}).values() if isinstance(value, str)]
        else:
            texts = [self.script] if "apply_patch" in self.script else []
        return next((text for text in texts if _PATCHED.search(text)), "")

    @cached_property
    def written_files(self) -> list[tuple[str, str]]:
        """The files that it writes, each with the new text as far as the call shows it."""
        if self.patch:
            added = "\n".join(line[1:] for line in self.patch.splitlines() if line.startswith("+"))
            return [(match[1] or match[2], added) for match in _PATCHED.finditer(self.patch)]
        if self.sort == "edit":
            edits = self._field(("edits",))
            parts = [part for part in edits if isinstance(part, dict)] if isinstance(edits, list) else []
            texts = [self._field(NEW), *(part.get(name) for part in parts for name in NEW)]
            return [(self.path, "\n".join(text for text in texts if isinstance(text, str)))] if self.path else []
        return [pair for command in self.commands for pair in _written(command)]

    def text_field(self, names: Sequence[str]) -> str | None:
        """The first of these arguments that is a text."""
        value = self._field(names)
        return value if isinstance(value, str) else None

    def _field(self, names: Sequence[str]) -> Any:
        """The first of these arguments, in whichever style its name is written (proxy/augment varies that)."""
        arguments = {_plain(name): value for name, value in (self.arguments or {}).items()}
        return next((arguments[name] for name in map(_plain, names) if name in arguments), None)


def _deeper(value: Any, levels: int) -> bool:
    """Whether the lists and objects of a JSON value are nested in more levels than these."""
    level = [value]
    for _ in range(levels):
        parts = (part for each in level for part in (each.values() if isinstance(each, dict) else each))
        level = [part for part in parts if isinstance(part, (dict, list))]
        if not level:
            return False
    return True


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _written(command: Command) -> list[tuple[str, str]]:
    """The files that a command writes."""
    arguments = [word for word in command.words[1:] if not word.startswith("-")]
    files = [name for name in command.writes if not name.startswith("/dev/")]
    if command.program == "tee" or (command.program in ("rm", "touch", "truncate") and arguments):
        files += arguments
    elif command.program in ("mv", "cp") and len(arguments) > 1:
        files += arguments if command.program == "mv" else arguments[-1:]
    elif command.program in ("sed", "perl") and any(re.match(r"-\w*i|--in-place", word) for word in command.words[1:]):
        files += arguments[1:]
    elif command.head in ("git checkout", "git restore"):
        files += arguments[1:]
    text = command.text or (command.line if command.writes else "")
    return [(name, text) for name in files]


def work_of(chain: Sequence[R]) -> list[R]:
    """Return the completions of an attempt that behaviour is read from.

    Side calls are no work, and no agent has acted on answers that broke off or that its client left.
    """
    return [item for item in chain if item.label != SIDE and item.finish_reason in SERVED_FINISH_REASONS]


def actions(chain: Sequence[Readable]) -> dict[int, list[Action]]:
    """Return the actions of an attempt's completions (in commit order) by completion, with their results."""
    results = results_behind(chain)
    done = {item.id: _of_reply(item, results.get(item.id, [])) for item in chain}
    shown: dict[str, list[ToolResult]] = {}
    for action in (action for some in done.values() for action in some):
        own = shown.setdefault(action.tool, [])
        if action.results and not action.fault:  # of several, one with a frame: a made-up one without hides none
            own.append(next((each for each in action.results if frames_first([each])), action.results[0]))
    first = {tool for tool, own in shown.items() if frames_first(own)}
    return {id: [replace(each, frames_first=each.tool in first) for each in some] for id, some in done.items()}


def turn_before(item: Readable) -> int | None:
    """The completion whose reply a request continues; None: it is not known, or there is none."""
    return item.follows or (item.shape.continues if item.shape else None)


def results_behind(chain: Sequence[Readable]) -> dict[int, list[tuple[ToolResult, ...]]]:
    """The results behind the reply of each completion, of each request that shows others than those before it."""
    shown: dict[int, dict[tuple[ToolResult, ...], None]] = {}
    for item in chain:
        before = turn_before(item)
        if before is not None and item.observed is not None and item.observed.results:
            shown.setdefault(before, {})[item.observed.results] = None
    return {id: list(some) for id, some in shown.items()}


def called(item: Readable) -> list[tuple[str, str]]:
    """The name and the arguments of each call of a reply, in the agent's words."""
    calls = [
        (str(call["function"]["name"]), _text(call["function"].get("arguments")))
        for call in item.reply.get("tool_calls") or ()
    ]
    told = item.observed.told if item.observed else ()
    if len(told) != len(calls):  # they are the model's, too
        return calls
    return [(words.name, words.arguments(written)) for words, (_, written) in zip(told, calls, strict=True)]


def _of_reply(item: Readable, shown: Sequence[Sequence[ToolResult]]) -> list[Action]:
    calls = item.reply.get("tool_calls") or ()
    if not calls:
        spoken = _differing(results[0] for results in shown if results[0].spoken)
        fenced = written_commands(item.reply.get("content") or "") if spoken else []
        return [Action(item.id, None, WRITTEN, fenced[0], results=spoken)] if len(fenced) == 1 else []
    faults = item.observed.faults if item.observed else ()
    ids = [call.get("id", "") for call in calls]
    matched = [results_of_calls(ids, results) for results in shown]
    return [
        Action(
            item.id,
            place,
            name,
            written,
            faults[place] if place < len(faults) else "",
            _differing(results[place] for results in matched),
        )
        for place, (name, written) in enumerate(called(item))
    ]


def _differing(results: Iterable[ToolResult | None]) -> tuple[ToolResult, ...]:
    return tuple(dict.fromkeys(result for result in results if result is not None))


def written_commands(content: str) -> list[str]:
    """Return the scripts in a text: its fenced commands, else all keystrokes of a JSON answer as one."""
    content = content[:LONGEST]
    try:
        typed = "".join(msgspec.json.decode(match[1], strict=False, type=str) for match in KEYS.finditer(content))
    except (msgspec.DecodeError, UnicodeEncodeError):
        typed = ""
    return FENCE.findall(content) or ([typed] if typed.strip() else [])


def _text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def results_of_calls(ids: Sequence[str], results: Sequence[ToolResult]) -> list[ToolResult | None]:
    """The result of each call: by its id, else by its place where agents name calls by ids of their own."""
    by_id = {result.call: result for result in results if result.call}
    if any(id in by_id for id in ids):
        return [by_id.get(id) for id in ids]
    if len(results) == len(ids):
        return list(results)
    alone = len(ids) == 1 and len(results) > 0
    return [results[0] if alone else None for _ in ids]
