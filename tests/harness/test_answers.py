"""The domains without a sandbox, end to end: one recorded call for each question, and the checker's verdict."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.setup.stack import RunningProxy
from tests.harness.conftest import HELLO, results, write_tasks
from tests.harness.scripts import COUNT

QUESTION = {"id": "six", "domain": "reasoning", "instruction": "What is 6 * 7?"}
RIGHT = QUESTION | {"checker": {"kind": "math", "answer": "42"}}
WRONG = QUESTION | {"id": "wrong", "checker": {"kind": "exact", "answer": "43"}}
CODE = {
    "id": "double",
    "domain": "qa",
    "instruction": "Write a function double",
    "checker": {"kind": "code", "path": "double.py"},
    "verifier": {"command": "python3 -c 'from double import double; assert double(4) == 8'"},
}


def ask(proxy: RunningProxy, tmp_path: Path, *tasks: dict[str, Any]) -> int:
    file = write_tasks(tmp_path / "tasks.jsonl", *tasks)
    where = ["--run-dir", str(tmp_path / "run"), "--name", tmp_path.name, "--proxy", proxy.url]
    return main(["run", str(file), "-n", "2", "--sandbox", "process", *where])


def test_questions_are_asked_and_their_answers_checked(proxy: RunningProxy, tmp_path: Path) -> None:
    assert ask(proxy, tmp_path, RIGHT, WRONG, CODE) == 0
    rows = results(tmp_path / "run")
    assert {(row["task"], row["reward"], row["completions"]) for row in rows} == {
        ("six", 1.0, 1),
        ("wrong", 0.0, 1),
        ("double", 1.0, 1),
    }
    assert len(rows) == 6 and {row["agent"] for row in rows} == {"one-call"}


def test_code_that_ends_its_verifier_is_spoiled(proxy: RunningProxy, tmp_path: Path) -> None:
    assert ask(proxy, tmp_path, CODE | {"instruction": "Write a function that nobody can call"}) == 0
    assert [(row["reward"], row["failure"]) for row in results(tmp_path / "run")] == [(None, "spoiled")] * 2


def test_they_run_beside_tasks_in_sandboxes(run: Callable[..., list[dict[str, Any]]]) -> None:
    rows = run(tasks=[HELLO, RIGHT])
    assert {(row["task"], row["agent"], row["reward"]) for row in rows} == {
        ("hello", "command", 1.0),
        ("six", "one-call", 1.0),
    }


def test_an_answer_that_does_not_come_in_time_is_the_policys_own(proxy: RunningProxy, tmp_path: Path) -> None:
    assert ask(proxy, tmp_path, RIGHT | {"instruction": COUNT, "timeout": 0.5}) == 0
    for row in results(tmp_path / "run"):
        assert (row["reward"], row["failure"]) == (0.0, "agent_budget")


@pytest.mark.parametrize(
    "task, sentence",
    [
        (HELLO, "the run has no agent; give --agent NAME"),
        (QUESTION | {"checker": {"kind": "judge", "rubric": "x"}}, "the checker of task 'six' is a judge; name its"),
    ],
)
def test_what_a_run_lacks_is_told_before_it_starts(
    proxy: RunningProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str], task: dict[str, Any], sentence: str
) -> None:
    assert ask(proxy, tmp_path, task) == 2
    assert sentence in capsys.readouterr().err
