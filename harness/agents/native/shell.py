"""A shell session: directory, variables and functions stay from one command to the next.

A command that takes too long, or ends the shell, costs the session, and the model is told so. Left out: a terminal, and
input for commands, which read an empty file.
"""

import os
import re
import secrets
import select
import signal
import subprocess
import time
from pathlib import Path

from .tool import Tool, ToolFailed, parameters

KEPT = 64 * 1024
"""Bytes that are kept of a command's output, at its beginning and at its end."""
SHELLS = ("bash", "dash", "sh", "ash")


class Shell:
    """A session, which starts with the first command. Close it by leaving the `with` block."""

    def __init__(self, seconds: float):
        self.directory = Path.cwd()
        """Where the session is."""
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def tool(self) -> Tool:
        return Tool(
            "shell", "Run a command in a shell session, which keeps its state.", parameters(command="string"), self.run
        )

    def run(self, command: str) -> str:
        """What the command printed, and its exit code where that is not 0."""
        if "\0" in command:
            raise ToolFailed("the command holds a zero byte")
        process = self._process or self._start()
        # a variable carries the text, so that nothing in it can end it early; `command` keeps sh alive when it is wrong
        line = f'{self._mark}={_quoted(command)}; command eval "${self._mark}" </dev/null\n'
        line += f'printf \'\\n%s %s %s\\n\' {self._mark}_end "$?" "$PWD"\n'
        assert process.stdin is not None
        try:
            process.stdin.write(line.encode(errors="replace"))
            process.stdin.flush()
        except BrokenPipeError:
            pass  # the shell has ended, as the output tells
        return self._result(process)

    def _result(self, process: "subprocess.Popen[bytes]") -> str:
        output = _Output(process, f"{self._mark}_end")
        end = output.read(time.monotonic() + self._seconds)
        if end is None:
            self._end()
            why = "the shell ended" if output.closed else f"the command timed out after {self._seconds:g} seconds"
            return f"{output.text()}\n[{why}; a new shell starts in {self.directory}]".lstrip()
        code, where = end
        self.directory = Path(where)
        return output.text() if code == "0" else f"{output.text()}\n[exit code: {code}]".lstrip()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._mark = f"_{secrets.token_hex(8)}"
        directory = self.directory if self.directory.is_dir() else Path.cwd()
        self._process = subprocess.Popen(
            [_program()], cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        return self._process

    def _end(self) -> None:
        """Kill the session with what it started."""
        process, self._process = self._process, None
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended by itself
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                try:
                    pipe.close()
                except BrokenPipeError:
                    pass  # what it did not read is lost with it


class _Output:
    """What a command prints, up to the line that the session prints behind it."""

    def __init__(self, process: "subprocess.Popen[bytes]", mark: str):
        assert process.stdout is not None
        self._process, self._file = process, process.stdout.fileno()
        self._end = re.compile(rb"\n" + mark.encode() + rb" (\d+) (.*)\n")
        self._head, self._tail, self._lost = b"", b"", 0
        self.closed = False

    def read(self, deadline: float) -> tuple[str, str] | None:
        """Read to the command's end and return its exit code and directory. None when it does not end in time."""
        while (left := deadline - time.monotonic()) > 0:
            ended = self._process.poll() is not None  # what it has started may still hold the pipe
            if not select.select([self._file], [], [], 0 if ended else min(left, 1))[0] and not ended:
                continue
            data = b"" if ended and not select.select([self._file], [], [], 0)[0] else os.read(self._file, KEPT)
            if not data:
                self.closed = True
                return None
            self._add(data)
            if found := self._end.search(self._tail):
                self._tail = self._tail[: found.start()]
                return found[1].decode(), os.fsdecode(found[2])
        return None

    def _add(self, data: bytes) -> None:
        self._tail += data
        if len(self._tail) > 2 * KEPT:  # the line at the end is shorter than what stays
            if not self._head:
                self._head, self._tail = self._tail[:KEPT], self._tail[KEPT:]
            self._lost += max(0, len(self._tail) - KEPT)
            self._tail = self._tail[-KEPT:]

    def text(self) -> str:
        gap = f"\n[... {self._lost} bytes left out ...]\n".encode() if self._lost else b""
        return (self._head + gap + self._tail).decode(errors="replace").rstrip("\n")


def _program() -> str:
    wanted = os.environ.get("SHELL", "")
    if os.path.basename(wanted) in SHELLS and os.access(wanted, os.X_OK):
        return wanted
    return next((path for path in ("/bin/bash", "/bin/sh") if os.access(path, os.X_OK)), "sh")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\"'\"'") + "'"
