"""What an agent wrote by hand, rather than by a program of the work: with an editor, with `echo`, in a small script."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from harness.integrity.scene import Scene, bounded
from proxy.pool.behaviour.actions import Action
from proxy.pool.behaviour.results import failure

_HANDS = re.compile(r"echo|printf|cat|tee|touch|sed|perl|jq|truncate|ed|dd|ln|cp|mv")
_OPENED = re.compile(
    r"open\(\s*[\"']([^\"'\n]{1,120})[\"']\s*,\s*[\"'][wa]|Path\(\s*[\"']([^\"'\n]{1,120})[\"']\s*\)\.write"
    r"|writeFile\w*\(\s*[\"']([^\"'\n]{1,120})[\"']|File\.write\(\s*[\"']([^\"'\n]{1,120})[\"']"
)
_ASSIGNED = re.compile(r"^[ \t]*(\w+)\s*=\s*(?:\w+\.)?(?:Path\()?\s*[\"']([\w./~-]+)[\"']", re.MULTILINE)


@dataclass(frozen=True)
class HandWritten:
    """A file that a call wrote, with the text that the call shows."""

    action: Action
    place: int
    """Place of the action among the attempt's."""
    path: str
    text: str

    @property
    def quote(self) -> str:
        return " ".join(self.text.split())[:120]


def hand_written(scene: Scene) -> Iterator[HandWritten]:
    """Yield the files that calls wrote with their content in the call itself, in order."""
    for place, action in enumerate(scene.actions):
        if failure(action) and action.sort != "shell":
            continue
        if action.sort == "edit" or action.patch:
            yield from (HandWritten(action, place, path, text) for path, text in action.written_files)
            continue
        for command in action.commands:
            if _HANDS.fullmatch(command.program):
                text = command.text or command.line
                names = [*command.writes, *(command.words[1:] if command.program in ("tee", "touch") else ())]
                names += command.words[-1:] if command.program in ("sed", "perl", "cp", "mv", "ln") else ()
                yield from (HandWritten(action, place, name, text) for name in names if not name.startswith("-"))
    scripts: dict[int | None, tuple[int, Action]] = {}
    for place, action in enumerate(scene.actions):
        if action.script:
            scripts.setdefault(action.completion, (place, action))
    for program in scene.run_texts:
        if (found := scripts.get(program.completion)) is not None:
            place, runs = found
            script = bounded(program.text)
            names = [next(filter(None, match.groups())) for match in _OPENED.finditer(script)]
            writes = re.search(r"open\(\s*\w+\s*,\s*[\"'][wa]|\.write", script)
            names += [value for _, value in _ASSIGNED.findall(script)[:20]] if writes else []
            yield from (HandWritten(runs, place, name, script) for name in dict.fromkeys(names))
