"""Progress of what one waits for: lines where there is no terminal, a bar where there is one."""

import os
import pty
import subprocess
import sys
import time

import pytest

from proxy.pool.terminal import progress as module
from proxy.pool.terminal.progress import progress


def test_without_a_terminal_a_line_comes_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "PLAIN_SECONDS", 0.05)
    with progress("verifying pool.db", total=4, unit="attempts") as advance:
        advance(1)
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("verifying pool.db: 1 of 4 attempts, ") for line in lines)
    assert lines[0].endswith(" s left")
    with progress("loading the model"):
        time.sleep(0.5)
    assert capsys.readouterr().err.startswith("loading the model: ")


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
