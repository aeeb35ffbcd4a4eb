"""Calls a user's function in a limited process, one call after the other, and survives what it does."""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from proxy.pool.errors import UserError
from proxy.pool.processes.parent import die_with_parent

CALL_SECONDS = 10.0
"""Time for one rollout, by the clock. A batch of hundreds waits for all of them, so a function takes milliseconds."""
IMPORT_SECONDS = 120.0
"""Time for the import of the module, which may load libraries from a cold disk."""


@dataclass(frozen=True)
class Weighed:
    """What a function said about a rollout."""

    weight: float | None
    """Its weight in the loss; 0: it is dropped. None: the function failed."""
    leave_out: tuple[int, ...] = ()
    """Ids of its completions that are not trained."""
    error: str = ""
    """How it failed, in a few words that are the same for all failures of this kind."""
    detail: str = ""


class FunctionProcess:
    """The process of a function. It is started when it is needed, and again after it was ended.

    UserError when the function cannot be imported. It ends with the thread that started it.
    """

    def __init__(self, name: str, purpose: Literal["weight", "reward"] = "weight", setting: str = "batch.function"):
        """`purpose`: what it is asked for; `setting`: what names it, for messages."""
        self._name, self._purpose, self._setting = name, purpose, setting
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._started()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def weigh(self, rollout: dict[str, Any]) -> Weighed:
        """Ask the function for the weight of a rollout, and for the completions that are not trained."""
        answer = self.call(rollout)
        left_out = tuple(answer.get("leave_out", ()))
        if foreign := set(left_out) - {item["id"] for item in rollout["completions"]}:
            error = "leaves out completions that are not the rollout's"
            return Weighed(None, error=error, detail=str(sorted(foreign)[:5]))
        return Weighed(answer.get("weight"), left_out, answer.get("error", ""), answer.get("detail", ""))

    def call(self, *arguments: Any) -> dict[str, Any]:
        """Call the function; `error` and `detail` say how it failed. Whatever it does, the next call finds it ready."""
        process, data = self._started(), msgspec.msgpack.encode(arguments)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone, and its missing answer says so
            process.stdin.write(len(data).to_bytes(4, "big") + data)
            process.stdin.flush()
        answer = _line(process, CALL_SECONDS)
        if answer is None:
            self._end()
            return {"error": f"took longer than {CALL_SECONDS:g} s"}
        return answer or {"error": f"ended its process with status {self._end()}"}

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None:
            return self._process
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "proxy.pool.functions.child", self._purpose, self._name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that what it has started ends with it
            preexec_fn=die_with_parent,
        )
        answer = _line(process, IMPORT_SECONDS)
        if answer == {} and process.poll() is None:
            return process
        why = f"its import took longer than {IMPORT_SECONDS:g} s" if answer is None else (answer or {}).get("error")
        self._end()
        raise UserError(
            f"{self._setting} = {self._name} cannot be used ({why or 'its import ended the process'}); name a function "
            "as package.module:function that Python finds from the directory in which the command starts"
        )

    def _end(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        for stream in (process.stdin, process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()
        return status


def _line(process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any] | None:
    """Read the next answer. None: it did not come in time. Empty at the end of the stream, too."""
    assert process.stdout is not None
    deadline, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(process.stdout.fileno(), 1 << 16)
        if not part:
            with suppress(subprocess.TimeoutExpired):  # it closed its output and runs on
                process.wait(seconds)
            return {}
        line += part
    answer: dict[str, Any] = msgspec.json.decode(line)
    return answer
