"""Lives of a trainer that end by kill -9 exactly where a test says.

`python -m tests.trainer.lives` imports the worker once and forks its ranks for every life, which makes a life cheap.
The forks run the worker's own code; a profiling hook, which only looks, kills one when it enters or leaves a function.
What torchrun does is done here too: when a rank is gone, the others are ended. Left out: torchrun (test_loop.py).
"""

import gc
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from proxy.engine.process import free_port

PROGRESS = ("loading ", "saving ", "pushing ")
"""What lines of progress begin with, where a machine is so busy that there are some."""


class End(msgspec.Struct, frozen=True):
    """When a rank dies: the `count`-th time that a function is at this event of sys.setprofile."""

    event: str = ""
    """call or return of a Python function by its qualified name, c_call of a built-in one. Empty: any of these."""
    name: str = ""
    """Empty: any function."""
    count: int = 1
    rank: int = 0


class Life(msgspec.Struct, frozen=True):
    """One start of a trainer."""

    arguments: list[str]
    ranks: int = 1
    end: End | None = None


class Lives:
    """The process that forks. `pids` are the ranks of the life that is being lived."""

    def __init__(self, log: Path):
        self.pids: list[int] = []
        self.log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.trainer.lives"],
                # A fork can use no GPU, as Megatron's imports call CUDA before it.
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
            )

    def live(self, *arguments: str, ranks: int = 1, end: End | None = None) -> list[int]:
        """The exit statuses of the ranks, each as subprocess tells it."""
        assert self._process.stdin and self._process.stdout
        life = Life(list(arguments), ranks, end)
        self._process.stdin.write(msgspec.json.encode(life) + b"\n")
        self._process.stdin.flush()
        self.pids = msgspec.json.decode(self._process.stdout.readline(), type=list[int])
        return msgspec.json.decode(self._process.stdout.readline(), type=list[int])

    def log_end(self) -> str:
        """Return the end of what all ranks have printed."""
        return self.log.read_text()[-2000:]

    def error_of(self, *arguments: str) -> str:
        """Live a life that prints its schedule and its progress at most, and ends with one error message; return that.

        Every such message names its page.
        """
        before = len(self.log.read_text())
        assert self.live(*arguments) == [2], self.log_end()
        lines = self.log.read_text()[before:].splitlines()
        printed = [line for line in lines if not line.startswith(("schedule ", *PROGRESS))]
        assert len(printed) == 1 and re.fullmatch(r"error: .* \(see docs/[a-z-]+\.md\)", printed[0]), printed
        return printed[0]

    def kill(self) -> None:
        """kill -9 of every rank, from another thread."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        """Its forks end with it."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    """Serve lives until stdin ends."""
    from trainer.commands import worker  # loads torch and Megatron, which the tests' own process need not

    gc.freeze()  # what is loaded stays for good: no life's collections look at it, or copy its pages
    for line in sys.stdin.buffer:
        life = msgspec.json.decode(line, type=Life)
        port = str(free_port()) if life.ranks > 1 else "0"
        pids = []
        for rank in range(life.ranks):
            pid = os.fork()
            if pid == 0:
                os.dup2(2, 1)
                places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(life.ranks)}
                os.environ.update(places, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                if life.end is not None and life.end.rank == rank:
                    _die_at(life.end)
                status = worker.main(life.arguments)
                sys.stdout.flush()
                os._exit(status)
            pids.append(pid)
        _say(pids)
        _say(_wait(pids))


def _wait(pids: Sequence[int]) -> list[int]:
    """The status of each; when one has failed, the others are killed."""
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids):
        pid, status = os.wait()
        statuses[pid] = os.waitstatus_to_exitcode(status)
        if statuses[pid]:
            for other in set(pids) - statuses.keys():
                os.kill(other, signal.SIGKILL)
    return [statuses[pid] for pid in pids]


def _die_at(end: End) -> None:
    left = end.count

    def look(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal left
        if end.event in ("", event):
            name = argument.__name__ if event == "c_call" else frame.f_code.co_qualname
            if end.name in ("", name):
                left -= 1
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(look)
    sys.setprofile(look)


def _say(value: list[int]) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
