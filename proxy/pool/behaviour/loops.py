"""Events in a row of calls: repeats, retries that fail again, edits that are undone, one tool over and over.

A call repeats another one only while nothing has changed in between, and not where its result is known to be new: to
run the tests again after an edit, or to poll, is no repeat.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from proxy.pool.behaviour.actions import NEW, OLD, Action
from proxy.pool.behaviour.event import Event, Kind, quoted
from proxy.pool.behaviour.results import failure

RETRIES = 3
"""Failures of about the same call in a row that make a loop."""
UNDONE = 2
"""Times that an edit goes back between the same two texts, or to what is committed, until it is a loop."""
COMMITTED = "what is committed"
MOST_IN_A_ROW, MOST_SEARCHES = 20, 12
"""Calls in a row with one command, and searches in a row, beyond which they are overused."""
SEARCHES = {"grep", "egrep", "rg", "ag", "find", "fd", "ls", "locate", "tree", "git grep"}
LOOKS = SEARCHES | {"cat", "head", "tail", "less", "wc", "pwd", "which", "file", "stat", "echo", "nl", "awk", "cut",
                    "sort", "uniq", "sed", "git status", "git log", "git diff", "git show", "git branch", "cd", "test",
                    "[", "du", "df", "env", "type", "true", "date", "sleep", "ps"}  # fmt: skip
"""Commands that change nothing, unless their output goes to a file."""
REMARKS = ("description", "explanation", "justification", "thought", "timeout", "timeout_ms", "yield_time_ms",
           "max_output_tokens", "security_risk")  # fmt: skip
"""Arguments that do not change what a call does."""
_TRAILING = re.compile(r" ?(?:2>&1|\|\| true|; ?$|\| ?(?:cat|head(?: -n? ?\d+)?|tail(?: -n? ?\d+)?) ?$)")

_FRAME = re.compile(r"Chunk ID: \S+|Wall time: [\d.]+|PGID: \d+")
"""What agents write around equal output that differs from call to call."""
FRAME = 16
"""Characters by which that may change the length of a result."""


@dataclass
class Conversation:
    """What one conversation has done so far."""

    since_change: dict[str, Action] = field(default_factory=dict)
    """Key -> the last such call, of those since something changed."""
    near_since_change: dict[str, Action] = field(default_factory=dict)
    failed_key: str = ""
    """The last call's key, if it failed, and how often it has in a row."""
    failed_times: int = 0
    edits: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    """File -> the texts that its edits took away, with those that they put in their place."""
    undone: dict[tuple[str, frozenset[str]], int] = field(default_factory=dict)
    """A file and two texts of it -> how often an edit went back from one to the other."""
    head: str = ""
    in_a_row: int = 0
    searches: int = 0

    def copy(self) -> "Conversation":
        """The same history, for a branch that goes on by itself."""
        return replace(
            self,
            since_change=dict(self.since_change),
            near_since_change=dict(self.near_since_change),
            edits={file: list(some) for file, some in self.edits.items()},
            undone=dict(self.undone),
        )

    def events(self, action: Action) -> Iterator[Event]:
        """Yield the events of the next action, and remember it."""
        yield from self._repeats(action)
        yield from self._retries(action)
        yield from self._undoes(action)
        yield from self._overuses(action)

    def _repeats(self, action: Action) -> Iterator[Event]:
        exact, near = _key(action), near_key(action)
        kinds = (
            (Kind.REPEATED_CALL, self.since_change.get(exact)),
            (Kind.NEAR_REPEATED_CALL, self.near_since_change.get(near)),
        )
        for kind, before in kinds:
            if before is not None and not _new_result(before, action):
                yield Event(kind, action.completion, action.call, action.name, quoted(action.written))
                break
        if changes(action):
            self.since_change.clear()
            self.near_since_change.clear()
        self.since_change[exact] = action
        self.near_since_change[near] = action

    def _retries(self, action: Action) -> Iterator[Event]:
        why = failure(action) or (action.fault and "malformed")
        if not why:
            self.failed_key, self.failed_times = "", 0
            return
        key = near_key(action)
        self.failed_times = self.failed_times + 1 if key == self.failed_key else 1
        self.failed_key = key
        if self.failed_times >= RETRIES:
            quote = quoted(f"{self.failed_times} times ({why}): {action.written}")
            yield Event(Kind.RETRY_LOOP, action.completion, action.call, action.name, quote)

    def _undoes(self, action: Action) -> Iterator[Event]:
        for file, old, new in _replacements(action):
            edits = self.edits.setdefault(file, [])
            old = edits[-1][1] if old is None and edits else old or ""
            back = (new, old) in edits if new != COMMITTED else bool(edits)
            if back and old != new:
                texts = (file, frozenset((COMMITTED,) if new == COMMITTED else (old, new)))
                self.undone[texts] = self.undone.get(texts, 0) + 1
                if self.undone[texts] >= UNDONE:
                    yield Event(Kind.UNDO_LOOP, action.completion, action.call, action.name, quoted(f"{file}: {new}"))
            edits.append((old, new))

    def _overuses(self, action: Action) -> Iterator[Event]:
        head = action.head or f"{action.tool} "
        self.in_a_row = self.in_a_row + 1 if head == self.head else 1
        self.head = head
        searching = action.sort == "search" or (
            bool(action.commands) and all(c.head in SEARCHES or c.program in ("cd", "head") for c in action.commands)
        )
        self.searches = self.searches + 1 if searching else 0
        if searching and self.searches > MOST_SEARCHES:
            quote = quoted(f"search {self.searches} in a row: {action.written}")
            yield Event(Kind.OVERUSED_SEARCH, action.completion, action.call, action.name, quote)
        elif not searching and self.in_a_row > MOST_IN_A_ROW:
            quote = quoted(f"call {self.in_a_row} in a row: {action.written}")
            yield Event(Kind.OVERUSED_TOOL, action.completion, action.call, action.name, quote)


def changes(action: Action) -> bool:
    """Whether an action may have changed anything that a later one could see."""
    if action.sort == "shell":
        writing = any(command.writes or command.text for command in action.commands)
        in_place = any(command.program == "sed" and "-i" in command.line for command in action.commands)
        return (
            writing
            or in_place
            or not all(command.head in LOOKS or command.program in LOOKS for command in action.commands)
        )
    return action.sort in ("edit", "other")


def near_key(action: Action) -> str:
    """Return what calls have in common that differ in spaces, quotes, remarks and what is done with the output."""
    if action.script:
        text = re.sub(r"[\s'\"]+", " ", action.script).strip().replace(" ./", " ")
        text = _TRAILING.sub("", re.sub(r"^cd [^;&|]+&&", "", text))
        return f"{action.tool} {text.strip()}"
    arguments = {name: value for name, value in (action.arguments or {}).items() if name not in REMARKS}
    text = json.dumps(arguments, sort_keys=True) if action.arguments is not None else action.written
    return f"{action.tool} " + re.sub(r"(?:\s|\\[nt])+", " ", text.replace('"./', '"'))


def _key(action: Action) -> str:
    """What equal calls have in common, however their JSON is written."""
    arguments = action.arguments
    return f"{action.tool} {action.written if arguments is None else json.dumps(arguments, sort_keys=True)}"


def _new_result(before: Action, action: Action) -> bool:
    """Whether two calls are known to have had different results."""
    one, two = before.result, action.result
    if one is None or two is None:
        return False
    texts = {_FRAME.sub("", result.head + result.tail) for result in (one, two)}
    return len(texts) > 1 or abs(one.size - two.size) > FRAME


def _replacements(action: Action) -> Iterator[tuple[str, str | None, str]]:
    """Each file that an action edits, with the text that it takes away (None: all) and the one in its place."""
    if action.sort == "edit" and action.path and not action.patch and (new := action.text_field(NEW)) is not None:
        yield action.path, action.text_field(OLD), new
    for command in action.commands:
        if command.head in ("git checkout", "git restore"):
            yield from ((word, None, COMMITTED) for word in command.words[2:] if not word.startswith("-"))
