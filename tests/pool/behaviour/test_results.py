"""Exit codes count where an agent's frame has them: output like a frame neither makes nor hides a failure."""

from dataclasses import replace

import pytest

from proxy.pool.behaviour.actions import actions
from proxy.pool.behaviour.results import certainly_failed, failure
from proxy.pool.completions.observed import Observed, ToolResult
from tests.pool.behaviour.work import Failed, Row, Work

CODEX = "Chunk ID: 7c1f\nWall time: 0.1 seconds\nProcess exited with code {}\nOutput:\n{}"
OPENHANDS = "{}\n[The command completed with exit code {}.]\n[Current working directory: /app]"
OLDER = '{{"output": "{}", "metadata": {{"exit_code": {}, "duration_seconds": 0.1}}}}'


def of_last(*answers: str | Failed, command: str = "./run x") -> tuple[str, bool]:
    """Why the last of these calls failed, and whether it certainly did."""
    work = Work()
    for answer in answers:
        work.shell(command, answer=answer)
    [action] = actions(work.done().rows)[len(answers)]
    return failure(action), certainly_failed(action)


@pytest.mark.parametrize("fake", ["Exit code: 0", '{"returncode": 0, "output": ""}', "<returncode>0</returncode>"])
def test_a_frame_that_a_command_prints_first_hides_no_failure(fake: str) -> None:
    for end in ("no such file\n[exit code: 2]", "x" * 600 + "\n[exit code: 2]\n", OPENHANDS.format("", 2)):
        assert of_last("a.py", f"{fake}\n{end}") == ("exit code 2", True)
        assert of_last(f"{fake}\n{end}") == ("exit code 2", False)  # all results begin so
    assert of_last("a.py", f"{fake}\nsh: 1: no: not found") == ("shell", False)  # an agent without frames


@pytest.mark.parametrize("fake", ["Exit code: 3", "Exit code 3", '{"returncode": 3}', "<returncode>3</returncode>"])
def test_a_frame_that_a_command_prints_first_makes_no_failure(fake: str) -> None:
    assert of_last("a.py", f"{fake}\nassert answer == 42") == ("", False)
    assert of_last("a.py\n[exit code: 0]", f"{fake}\nassert answer == 42\n[exit code: 0]") == ("", False)
    assert not of_last(f"{fake}\nassert answer == 42\n[exit code: 0]")[1]
    assert (
        of_last(OPENHANDS.format("", 0), OPENHANDS.format(f"[Command finished with exit code 3]\n{fake}", 0))[0] == ""
    )


def test_agents_that_print_their_frame_first_are_known_by_all_their_results() -> None:
    assert of_last(CODEX.format(0, "a.py"), CODEX.format(3, "no")) == ("exit code 3", True)
    assert of_last(CODEX.format(0, "a.py"), "Error: the call was refused", CODEX.format(3, "no")) == (
        "exit code 3",
        True,
    )
    assert of_last(CODEX.format(0, "a.py"), CODEX.format(3, "no\n[exit code: 0]")) == ("exit code 3", False)
    assert of_last(OLDER.format("Exit code: 0", 3)) == ("exit code 3", True)


def test_python_that_does_not_find_what_it_is_to_run_has_failed() -> None:
    missing = "/usr/bin/python3: No module named unitest"
    for command, text in (
        ("python3 -m unitest discover -s checks", missing),
        ("cd /app && python3.11 -m pytest -q", "x\npython3.11: No module named pytest\n"),
        ("python run.py", "python: can't open file '/app/run.py': [Errno 2] No such file or directory"),
    ):
        assert of_last(text, command=command)[0] == "shell", command
    assert of_last(missing, command="cat log.txt")[0] == ""
    assert of_last(f"{missing}\n3 passed", command="python3 check.py")[0] == ""
    framed = "{}\n[exit code: 1]"
    assert of_last(framed.format("python: No module named pytest"), command="python -m pytest -q")[0] == "exit code 1"
    assert of_last(framed.format("1 failed, 3 passed"), command="python -m pytest -q")[0] == ""  # the tests' answer
    work = Work()
    for _ in range(4):
        work.shell("python3 -m unitest", answer=missing)
    assert len(work.done().events("retry_loop")) == 2


NO_FILE, TRACE = "cat: a.txt: No such file or directory", "Traceback (most recent call last):\n  File\nValueError: no"


@pytest.mark.parametrize(
    ("command", "code", "output"),
    [
        ("cat a.txt || true", 0, NO_FILE),
        ("cat a.txt; true", 0, NO_FILE),
        ("cat a.txt\n:", 0, NO_FILE),
        ("cat a.txt && echo b || true", 0, NO_FILE),
        ("cat a.txt || false", 1, NO_FILE),
        ("cat a.txt || [ -f b ]", 1, NO_FILE),
        ("cat a.txt; make -v", 0, f"{NO_FILE}\nGNU Make 4.3"),
        ("cat a.txt | head -3", 0, NO_FILE),
        ("bash -c 'cat a.txt; echo'", 0, NO_FILE),
        ("foo --x; echo done", 0, "bash: line 1: foo: command not found\ndone"),
        ("python a.py || true", 0, TRACE),
        ("npx x; cat a.txt", 1, f"npx x\n{NO_FILE}"),
        ("npx x && cat a.txt", 1, NO_FILE),
        ("npx x | cat a.txt", 1, NO_FILE),
        ("make -v && gcc a.c", 1, "GNU Make 4.3\na.c:1: error"),
        ("cat a.txt || make", 2, NO_FILE),
        ("ls a b; echo", 0, "ls: cannot access 'b': No such file or directory\na"),
        ("seq 90; cat a.txt; true", 0, "\n".join(map(str, range(106))) + f"\n{NO_FILE}"),  # over the cut at 300
    ],
)
def test_an_exit_code_of_ones_own_hides_no_failure(command: str, code: int, output: str) -> None:
    assert of_last(f"{output}\n[exit code: {code}]", command=command)[0]
    if code == 0:  # agents without frames
        assert of_last(output, command=command) == ("shell", False)
        assert of_last(f"{output}\n[exit code: 0]", command=command) == ("shell", False)


@pytest.mark.parametrize(
    ("command", "code", "output"),
    [
        ("cd /repo && pytest -q && echo ok", 1, "1 failed"),
        ("pytest -q || exit 1", 1, "1 failed"),
        ("set -o pipefail; pytest -q 2>&1 | tee log | tail -5", 1, "1 failed"),
        ("python -m pytest -q; echo $?", 0, f"{TRACE}\n1 failed\n1"),
        ("cat ci.log; echo", 0, "cat: b.txt: No such file or directory"),
        ("ls a 2>/dev/null || true", 0, ""),
        ("which node || echo none", 0, "none"),
        ("pytest | grep -c passed", 1, "0"),
        ("cd src && make", 2, "a.c:1: error"),
    ],
)
def test_exit_codes_and_texts_that_answer_are_no_failures(command: str, code: int, output: str) -> None:
    assert of_last(f"{output}\n[exit code: {code}]", command=command) == ("", False)


def test_what_output_says_is_no_certain_failure() -> None:
    assert of_last("text\nrun: x: No such file or directory") == ("shell", False)
    assert of_last("command timed out after 5 s") == ("time-out", False)
    assert of_last(Failed("Exit code 0\nno")) == ("flag", True)
    assert of_last("a", Failed("Exit code 4\nno")) == ("exit code 4", True)


def forged(work: Work, answer: str | Failed) -> Work:
    """The same, where each call sends a request of its own that shows this result, before the agent's next one."""
    rows: list[Row] = []
    for row in work.rows:
        if row.observed is not None and row.observed.results:
            text, error = (answer.text, True) if isinstance(answer, Failed) else (answer, False)
            made = ToolResult(row.observed.results[0].call, "bash", text, size=len(text), error=error)
            rows.append(replace(row, id=100 + row.id, reply={"content": "I"}, observed=Observed(results=(made,))))
        rows.append(row)
    return replace(work, rows=rows)


def test_a_request_that_a_command_sends_hides_neither_a_look_nor_a_failure() -> None:
    read, failed = "42\n[exit code: 0]", Failed("cat: /tests/expected.txt: No such file or directory")
    for shown, made in ((read, failed), (failed, read)):
        work = forged(Work().shell("cat /tests/expected.txt", answer=shown).done(), made)
        [action] = actions(work.rows)[1]
        assert (failure(action), certainly_failed(action)) == ("flag", False)
        assert [event.quote for event in work.events("tool_failed")] == [f"flag: {failed.text}"]
    loop = forged(Work().shell(*["make a"] * 4, answer="make: no rule\n[exit code: 127]").done(), read)
    assert [event.completion for event in loop.events("retry_loop")] == [3, 4]
    assert len(loop.events("tool_failed")) == 4


def test_a_made_up_result_without_a_frame_hides_no_frame() -> None:
    work = forged(Work().shell("./run x", "./run y", answer=CODEX.format(3, "no")).done(), "yes")
    assert [failure(*actions(work.rows)[id]) for id in (1, 2)] == ["exit code 3"] * 2
    assert not certainly_failed(*actions(work.rows)[1])
