"""All that a detector looks at: an attempt's completions as actions and events, and the sandbox' evidence."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from harness.integrity.asked import Asked
from harness.integrity.evidence import CODE, LONGEST_LINE, Evidence, FileChange
from harness.integrity.finding import Finding, Severity
from harness.integrity.judged import judging
from proxy.pool.behaviour.actions import Action, Readable, actions, work_of
from proxy.pool.behaviour.event import Event, quoted
from proxy.pool.behaviour.read import events
from proxy.pool.behaviour.shell import Command

TEST_FILE = re.compile(
    r"(?:^|/)(?:tests?|__tests__|specs?|testing|e2e|t)/|\.(?:t|bats)$|(?:^|/)(?:test_[^/]*|[^/]*_tests?|tests?"
    r"|specs?|conftest|[^/]*_spec"
    r"|[^/]*\.(?:test|spec)|[^/]*Tests?)\.\w+$"
)
MADE = re.compile(
    r"(?:^|/)\.?v?env\w*/|node_modules/|/(?:site|dist)-packages/|\.gitconfig$|\.git/|\.npmrc$|^/etc/hosts$"
    r"|/\.nvm/|/\.cargo/"
)
"""What installers and git make by themselves."""
INTERPRETERS = re.compile(r"(?:python|pypy)[\d.]*|node|ruby|perl|php|deno|bun|Rscript|julia|lua|awk|gawk")
_INLINE = {"-c", "-e", "--eval", "-r", "-p"}
LONGEST_SCRIPT = 20_000
"""Characters of a shell's script that rules look at."""
LONGEST = 100_000
"""Characters of one text that rules look at."""


@dataclass(frozen=True)
class WrittenText:
    """Something that the agent wrote: a file as it was left, the new lines of it, or a program given on a command."""

    place: str
    """The file's path; empty: a program that was only run."""
    text: str
    completion: int | None


def bounded(script: str) -> str:
    """Return a script with its lines cut, so that rules which look along a line stay quick."""
    return "\n".join(line[:LONGEST_LINE] for line in script[:LONGEST_SCRIPT].splitlines())


class ObservedCompletion(Readable, Protocol):
    """A recorded completion."""

    @property
    def ordinal(self) -> int: ...


class Scene:
    """One attempt."""

    def __init__(self, chain: Sequence[ObservedCompletion], evidence: Evidence):
        self.evidence = evidence
        self.asked = Asked(evidence.prompt)
        self.work = work_of(chain)
        self._ordinals = {item.id: item.ordinal for item in chain}

    @cached_property
    def events(self) -> list[Event]:
        """The attempt's events, made when a detector asks: where they cannot be, the others still look."""
        return events(self.work)

    @cached_property
    def actions(self) -> list[Action]:
        """The attempt's tool calls in order."""
        done = actions(self.work)
        return [action for item in self.work for action in done[item.id]]

    def finding(self, detector: str, severity: Severity, quote: str, completion: int | None = None) -> Finding:
        """Make a finding."""
        ordinal = self._ordinals.get(completion) if completion is not None else None
        return Finding(
            detector=detector, severity=severity, quote=quoted(quote), completion=completion, ordinal=ordinal
        )

    @cached_property
    def commands(self) -> list[tuple[int, Command]]:
        """Each simple command of the agent's shells, with its completion."""
        return [(action.completion, command) for action in self.actions for command in action.commands]

    @cached_property
    def code(self) -> list[WrittenText]:
        """The new lines of program files outside of tests, as they were left, and programs that were run from shells.

        A file that is written and later put back is not among them.
        """
        left = [change for change in self.evidence.changes if change.after is not None]
        files = [
            WrittenText(change.path, "\n".join(change.added_lines)[:LONGEST], self.writer(change.path))
            for change in left
            if is_code(change) and not TEST_FILE.search(change.path)
        ]
        return [*files, *self.run_texts, *self._elsewhere]

    @cached_property
    def run_texts(self) -> list[WrittenText]:
        """Programs that stand in a command, behind `-c` or in a here-document."""
        texts = []
        for completion, command in self.commands:
            if not INTERPRETERS.fullmatch(command.program):
                continue
            inline = [word for option, word in zip(command.words, command.words[1:], strict=False) if option in _INLINE]
            texts += [WrittenText("", bounded(text), completion) for text in (*inline, command.text) if text]
        return texts

    @cached_property
    def _elsewhere(self) -> list[WrittenText]:
        """Program files that were written outside of what the evidence covers, and not removed again."""
        removed = {word for _, command in self.commands if command.program == "rm" for word in command.words[1:]}
        return [
            WrittenText(path, bounded(text), action.completion)
            for action in self.actions
            for path, text in action.written_files
            if path.startswith(("/", "~")) and path not in removed and self.change(path) is None and CODE.search(path)
            if not self.given(path)
        ]

    @cached_property
    def judging(self) -> dict[str, str]:
        """The given files that judge the work and that the instruction does not ask to change."""
        return judging(self.evidence.given, self.evidence.verifier, self.asked)

    def change(self, path: str) -> FileChange | None:
        """Return the change of a file that a call names, perhaps by its absolute path."""
        return next((change for change in self.evidence.changes if same_file(change.path, path)), None)

    def given(self, path: str) -> bool:
        """Whether the task gave this file to the agent."""
        return any(same_file(own, path) for own in self.evidence.given)

    def writer(self, path: str) -> int | None:
        """Return the last completion that wrote a file, as far as its calls show it."""
        direct = [
            action.completion
            for action in self.actions
            for written, _ in action.written_files
            if same_file(path, written)
        ]
        name = path.rpartition("/")[2]
        named = [action.completion for action in self.actions if name in action.written] if not direct else []
        return next(reversed(direct or named), None)

    def changes(self, pattern: "re.Pattern[str]") -> Iterator[FileChange]:
        """Yield the changes of files with such a path."""
        return (change for change in self.evidence.changes if pattern.search(change.path))


def is_code(change: FileChange) -> bool:
    """Whether a file holds a program, by its name or its first line."""
    return bool(CODE.search(change.path)) or (change.after or "").startswith("#!")


def same_file(path: str, other: str) -> bool:
    """Whether two paths name the same file, where one may be relative to a directory of the other."""
    path, other = (one.removeprefix("./").removeprefix("~") for one in (path, other))
    return path == other or path.endswith(f"/{other.lstrip('/')}") or other.endswith(f"/{path.lstrip('/')}")


Detector = Callable[[Scene], Iterator[Finding]]
