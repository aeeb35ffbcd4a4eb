"""What the harness knows when it has a verdict: the task, what judges it, and the files that the agent changed."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from harness.environment.file_manifest import FileDifference
from harness.tasks import Task
from harness.verdict.findings import IsolationFindings
from harness.verdict.task_texts import texts_of

LONGEST = 1 << 16
"""Characters of one file of the task's that are looked at, and bytes of one that the agent changed."""
LONGEST_LINE = 600
"""Characters of a line that rules look at: a hostile one must not take their time."""
MOST = 300
"""Changed files that are read."""
CODE = re.compile(
    r"\.(?:py|pyx|pyi|js|mjs|cjs|ts|tsx|jsx|go|rs|c|h|cc|cpp|hpp|java|kt|rb|php|sh|bash|lua|pl|r|jl|scala|cs|swift|ex"
    r"|hs|ml|sql|awk|pm|t|bats|lean|agda|dfy|idr|zig|nim|f90|clj|dart|vue|svelte|v"
    r"|cu|cuh|exs|erl|elm|fs|groovy|ps1|zsh|mts|cts|glsl|wgsl|sv|cr|cljs)$",
    re.IGNORECASE,
)
_NOISE = re.compile(
    r"(?:^|/)(?:\.git/(?!hooks/|config$)|node_modules/|\.cache/|\.npm/|\.bundle/|\.local/share/|\.(?:bash|python"
    r"|node_repl)_history$|\.venv/lib|venv/lib|\.tox/|\.(?:claude|codex|gemini|qwen|cline)(?:/|\.json$)"
    r"|\.aider\.[\w.]+(?:/|$)|\.config/(?:opencode|kilo)/)"
)
"""What git, package managers and agents write by themselves."""


@dataclass(frozen=True)
class FileChange:
    """A file that the agent added, changed or removed."""

    path: str
    """Relative to the working directory where it lies in it, else absolute."""
    existed: bool
    before: str | None
    """None: it did not exist, or its text is not known."""
    after: str | None
    """None: it is gone, or its text is not known (too long, or no text)."""
    removed: bool = False

    @cached_property
    def added_lines(self) -> list[str]:
        """The lines that are new. All of a file whose earlier text is not known."""
        return _beyond(_lines(self.after), _lines(self.before))

    @cached_property
    def removed_lines(self) -> list[str]:
        return _beyond(_lines(self.before), _lines(self.after))


@dataclass(frozen=True)
class Evidence:
    """What one attempt left in its sandbox, and what it was given and is judged by."""

    prompt: str
    """What the agent was asked."""
    given: Mapping[str, str]
    """The texts of the files that the task gave to it."""
    changes: Sequence[FileChange]
    verifier: Mapping[str, str]
    """The texts of what judges: files by their paths, and under the empty path commands and cases."""
    undone: Sequence[str] = ()
    """Files that steer a verifier and that the agent had added or changed, which were put back before the verdict."""
    work: str = ""
    """The working directory; empty: not known."""
    unread: Sequence[str] = ()
    """Changed programs whose text, now or before the agent, is not known: so nobody can say what the agent wrote. If no
    file of the sandbox could be read, all changed files that are evidence."""

    def outside(self, path: str) -> bool:
        """Whether an absolute path lies outside of the working directory."""
        below = bool(self.work) and path.startswith(f"{self.work.rstrip('/')}/")
        return path.startswith(("/", "~", "$HOME")) and not below


def readable(difference: FileDifference) -> list[str]:
    """Return the paths of those changed files whose text is evidence, at most `MOST`: programs and tests first."""
    paths = [path for path in (*difference.changed, *difference.added) if not _NOISE.search(path)]
    kept = [path for path in paths if "__pycache__" not in path]
    return sorted(kept, key=lambda path: not CODE.search(path))[:MOST]


def as_text(content: bytes) -> str | None:
    """Return the content of a file as text; None: it is binary."""
    return None if b"\0" in content else content.decode(errors="replace")


def evidence_of(task: Task, work: str, findings: IsolationFindings, texts: Mapping[str, str]) -> Evidence:
    """Return the evidence of an attempt. `texts`: the changed files' texts now, by absolute path."""
    known = {_below(path, work): as_text(content) for path, content in findings.originals.items()}
    given = {path: text for path, text in known.items() if text is not None}
    given = _texts(task.files, task.directories, task.digest) | given
    difference = findings.difference
    added, removed = set(difference.added), set(difference.removed)
    changes, unread = [], []
    for path in (*difference.added, *difference.changed, *difference.removed):
        name = _below(path, work)
        if not _NOISE.search(path):
            existed, after = path not in added, texts.get(path)
            before = given.get(name) if existed else None
            if existed and before is None:  # its old lines would pass for new ones
                after = None
            if after is None and path not in removed and CODE.search(path) and "__pycache__" not in path:
                unread.append(name)
            changes.append(FileChange(name, existed, before, after, path in removed))
    verifier = _texts(task.verifier.files, task.verifier.directories, task.digest)
    verifier[""] = task.verifier.command
    if task.verifier.cases:
        verifier[""] += msgspec.json.encode(task.verifier.cases).decode()
    undone = tuple(_below(path, work) for path in (*findings.removed, *findings.restored, *findings.left))
    return Evidence(task.instruction, given, changes, verifier, undone, work, unread)


def _texts(files: Mapping[str, str], directories: Mapping[str, str], digest: str) -> dict[str, str]:
    return {path.removeprefix("./"): text[:LONGEST] for path, text in texts_of(files, directories, digest)}


def _below(path: str, work: str) -> str:
    return path.removeprefix(f"{work.rstrip('/')}/")


def _lines(text: str | None) -> list[str]:
    return [line[:LONGEST_LINE] for line in (text or "").splitlines()]


def _beyond(lines: list[str], others: list[str]) -> list[str]:
    """The lines that the others lack, in order. One that stands n times more often here than there comes n times."""
    left: dict[str, int] = {}
    for line in others:
        left[line.strip()] = left.get(line.strip(), 0) + 1
    beyond = []
    for line in lines:
        if left.get(line.strip(), 0):
            left[line.strip()] -= 1
        elif line.strip():
            beyond.append(line)
    return beyond
