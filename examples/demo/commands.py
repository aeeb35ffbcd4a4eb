"""Runs the project's commands: in the foreground with a log, or in the background until they are stopped.

For every example that is more than files, with the directory that it works in.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent


def clear(directory: Path, mark: str) -> None:
    """Make a directory empty. Only what an earlier run of the same example left is deleted, as the file `mark` tells.

    SystemExit when the directory holds anything else.
    """
    if directory.exists() and any(directory.iterdir()) and not (directory / mark).exists():
        raise SystemExit(
            f"error: {directory} holds files that are not of an earlier run of this example; name another directory"
        )
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    (directory / mark).touch()


def run_command(command: list[str], log: Path) -> None:
    """Run one of the project's console scripts. When it fails, raise SystemExit with the end of its log."""
    with log.open("a") as output:
        code = subprocess.run(
            _argv(command), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        ).returncode
    if code:
        raise SystemExit(f"`{' '.join(command[:2])}` ended with {code}; the end of {log}:\n{_end(log)}")


class Background:
    """One of the project's console scripts, which runs until `stop`. It also dies with this process (setpriv)."""

    def __init__(self, command: list[str], log: Path, ready: Path | None = None):
        ready_option = [] if ready is None else ["--ready-file", str(ready)]
        with log.open("a") as output:
            self._process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", "--", *_argv(command + ready_option)],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._log, self._ready, self._name = log, ready, " ".join(command[:2])

    def wait_ready(self, seconds: float = 180) -> dict[str, Any]:
        """Wait for the command's ready file and return what it holds, such as the URL."""
        assert self._ready is not None
        deadline = time.monotonic() + seconds
        while not self._ready.exists():
            self.check()
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"`{self._name}` was not ready within {seconds:.0f} s; the end of {self._log}:\n{_end(self._log)}"
                )
            time.sleep(0.05)
        return json.loads(self._ready.read_text())

    def check(self) -> None:
        """Raise SystemExit with the end of the log when the command has failed."""
        if self._process.poll():
            raise SystemExit(
                f"`{self._name}` ended with {self._process.returncode}; the end of {self._log}:\n{_end(self._log)}"
            )

    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self, seconds: float = 30) -> None:
        """Ask the command to end; after `seconds` kill its whole process group."""
        if self.running():
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _argv(command: list[str]) -> list[str]:
    return [str(BIN / command[0]), *command[1:]]


def _end(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
