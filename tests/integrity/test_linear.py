"""What looks at a policy's text or at its files looks once: it holds the interpreter's lock, so nothing else runs."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness.environment.archive import Entry
from harness.environment.file_manifest import FileDifference, FileManifest
from harness.integrity.detectors import checks
from harness.integrity.detectors.answers import grader_read
from harness.integrity.evidence import Evidence, FileChange, evidence_of
from harness.integrity.scene import Scene
from harness.tasks import Task
from harness.tasks.schema import Artifact
from harness.verdict.carried.compare import Comparison, Place, _set_apart
from harness.verdict.carried.git import harmless
from harness.verdict.checkers import final_answer
from harness.verdict.findings import IsolationFindings
from proxy.pool.behaviour.actions import actions
from proxy.pool.behaviour.read import events
from proxy.pool.behaviour.shell import commands
from proxy.pool.completions.observed import Observed, ToolResult
from tests.harness.conftest import HELLO
from tests.pool.behaviour.work import Row

NOTHING = Evidence("Mend it.", {}, (), {}, work="/app")
SLACK = 0.05
"""Seconds that no look is too slow for, above all for the clock's."""


def seconds(read: Callable[[Any], object], seen: object) -> float:
    """The seconds of this process that a look takes, the best of three."""
    best = float("inf")
    for _ in range(3):
        began = time.process_time()
        read(seen)
        best = min(best, time.process_time() - began)
    return best


def called(name: str, arguments: dict[str, str]) -> Any:
    """A completion that makes one call."""
    call = {"id": "1", "function": {"name": name, "arguments": json.dumps(arguments)}}
    return Row(1, None, "tool_calls", {"content": "", "tool_calls": [call]}, None)


def written(text: str) -> object:
    return events([called("write", {"filePath": "tests/test_a.py", "content": text})])


def run(text: str) -> object:
    return events([called("bash", {"command": text})])


def spoken(text: str) -> object:
    screen = Observed(results=(ToolResult("", "", "ok", spoken=True),))
    return events([Row(1, None, "stop", {"content": text}, None), Row(2, 1, "stop", {"content": "Done."}, screen)])


def looked_for(text: str) -> object:
    """One detector's look; the scene knows no ordinals."""
    scene = Scene([], NOTHING)
    scene.actions = actions([called("bash", {"command": text})])[1]
    return list(grader_read(scene))


def changed(text: str) -> object:
    return list(
        checks.tests_weakened(Scene([], Evidence("", {}, [FileChange("test_a.py", True, text, text + "x")], {})))
    )


def of_a_section(text: str) -> object:
    """A git configuration with this in a section's name, and as many variables below it."""
    return harmless(f'[remote "{text}"]\n' + "a\n" * len(text))


@pytest.mark.parametrize(
    ("read", "unit", "size"),
    [
        (commands, "<<{A}\n", 2_000),
        (run, "rm -{r}!", 3_000),
        (written, "exit({ }", 4_000),
        (spoken, "```{bash}", 2_000),
        (looked_for, "'", 1_000),
        (changed, '\\"', 2_000),
        (harmless, "a = x{ }y", 2_000),
        (of_a_section, ".", 1_000),
        (final_answer, "the answer is{\n}", 2_000),
    ],
)
def test_four_times_the_text_takes_about_four_times_the_time(
    read: Callable[[str], object], unit: str, size: int
) -> None:
    """Expressions that look for the end of each beginning again take sixteen times as long."""
    once, more = (seconds(read, _text(unit, many)) for many in (size, 4 * size))
    assert more <= 8 * once + SLACK


def repositories(number: int) -> list[str]:
    return [f"{one}/.git/{name}" for one in range(number) for name in ("HEAD", "hooks/pre-commit")]


def directories(number: int) -> list[str]:
    return [str(one) for one in range(number)]


def set_apart(entries: dict[str, Entry]) -> object:
    place = Place(Artifact(path="."), "/work", "")
    given = Comparison(task=msgspec.convert(HELLO, Task), place=place, modules=list, staging=Path(), limit=0)
    return _set_apart(given, {}, entries)


@pytest.mark.parametrize(("left", "number"), [(repositories, 1_000), (directories, 2_000)])
def test_four_times_the_files_take_about_four_times_the_time(left: Callable[[int], list[str]], number: int) -> None:
    """Each repository, and each new directory, was looked for among all files again."""
    once, more = (
        seconds(set_apart, {path: Entry("file" if "/" in path else "directory") for path in left(many)})
        for many in (number, 4 * number)
    )
    assert more <= 8 * once + SLACK


def without(paths: list[str]) -> object:
    return FileManifest(dict.fromkeys(paths, "f 0"), whole=True).without(paths)


def evidence(paths: list[str]) -> object:
    findings = IsolationFindings(FileDifference(added=paths), [], [], [])
    return evidence_of(msgspec.convert(HELLO, Task), "/app", findings, {})


@pytest.mark.parametrize("look", [without, evidence])
def test_four_times_the_new_files_take_about_four_times_the_time(look: Callable[[list[str]], object]) -> None:
    """Each new file was looked for among all others."""
    once, more = (seconds(look, [f"/tmp/{one}" for one in range(many)]) for many in (4_000, 16_000))
    assert more <= 8 * once + SLACK


def _text(unit: str, size: int) -> str:
    """A unit over and over; of one with braces, what stands in them, and then as many lines."""
    before, brace, rest = unit.partition("{")
    if not brace:
        return (unit * size)[:size]
    repeated, _, behind = rest.partition("}")
    return before + (repeated * size)[:size] + behind + "\n" * size
