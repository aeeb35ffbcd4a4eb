"""Progress of what one waits for: lines where there is no terminal, a bar where there is one."""

import os
import pty
import re
import subprocess
import sys
import time

import pytest

from proxy.commands.main import main
from proxy.pool.database import Pool
from proxy.pool.rollouts.runs import open_run
from proxy.pool.terminal import progress as module
from proxy.pool.terminal.progress import pace, progress
from tests.pool.make import finished_group
from tests.pool.told import tell_at_once


def said_until(capsys: pytest.CaptureFixture[str], text: str) -> list[str]:
    """Wait until a whole line has this text, and return the lines up to it."""
    said, deadline = "", time.monotonic() + 60
    while text not in said.rpartition("\n")[0]:
        assert time.monotonic() < deadline, said
        time.sleep(0.01)
        said += capsys.readouterr().err
    return said.splitlines()


def test_without_a_terminal_a_line_comes_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "PLAIN_SECONDS", 0.05)
    with progress("verifying pool.db", total=4, unit="attempts") as advance:
        advance(1)
        *_, line = said_until(capsys, "1 of 4")
        assert line.startswith("verifying pool.db: 1 of 4 attempts, ") and line.endswith(" s left")
    capsys.readouterr()
    with progress("loading the model"):
        assert said_until(capsys, "model")[0].startswith("loading the model: ")


def test_what_goes_on_may_change(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "PLAIN_SECONDS", 0.05)
    steps = ["Step 1/2"]
    with progress(lambda: f"building: {steps[-1]}"):
        assert said_until(capsys, "Step")[0].startswith("building: Step 1/2: ")
        steps.append("Step 2/2")
        assert said_until(capsys, "2/2")[-1].startswith("building: Step 2/2: ")


def test_the_command_that_verifies_a_pool_says_how_many_attempts_are_left(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(pool, "r", "train", {})
    finished_group(pool, run.id, [1.0] * 60)
    tell_at_once(monkeypatch)
    assert main(["pool", "verify", pool.url]) == 0
    printed = capsys.readouterr()
    assert "60 attempts" in printed.out
    lines = printed.err.splitlines()
    assert lines and all(re.match(rf"verifying {re.escape(pool.name)}: \d+ of 60 attempts", line) for line in lines)
    assert re.search(r", \S+/s, \d+ s left$", lines[-1])


@pytest.mark.parametrize(
    ("done", "total", "text"),
    [(0, 10, ""), (5, None, "2.5/s"), (5, 10, "2.5/s, 2 s left"), (12, 10, "6/s, 0 s left")],
)
def test_the_rate_and_the_rest_follow_from_what_is_done(done: float, total: float | None, text: str) -> None:
    assert pace(done, total, seconds=2.0) == text


def test_quick_work_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("verifying pool.db", total=1, unit="attempts") as advance:
        advance(1)
    assert capsys.readouterr().err == ""


CODE = """\
import time
from proxy.pool.terminal.progress import progress
with progress("verifying", total=4, unit="attempts") as advance:
    advance(3)
    time.sleep(0.5)
"""


def test_on_a_terminal_it_is_a_bar() -> None:
    ours, theirs = pty.openpty()
    done = subprocess.run([sys.executable, "-c", CODE], stderr=theirs, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert done.returncode == 0 and "verifying" in shown and "3/4" in shown and "attempts" in shown
