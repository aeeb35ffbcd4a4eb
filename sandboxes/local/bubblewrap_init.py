"""Process 1 of a bubblewrap sandbox: drops root, forwards to the model, starts commands, reaps.

Signals from inside do not reach it and nobody inside may trace it; when it ends, the kernel ends everything in its
namespace. Requests arrive on an inherited socket that nobody inside can open. A request is a number with two file
descriptors: a file of JSON, and the command's output. The answer is the number with an exit code or an error.
"""

import asyncio
import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
from signal import SIGCHLD
from typing import Any

from sandboxes.network import relay

_PR_SET_DUMPABLE = 4


class Starter:
    """Starts commands and reports their ends."""

    def __init__(self, control: socket.socket):
        self._control = control
        self._running: dict[int, int] = {}
        """Process id -> number of the request."""

    def say(self, **what: Any) -> None:
        self._control.send(json.dumps(what).encode())

    def take(self) -> None:
        """Handle one request. When the socket ends, our owner has ended, so end too."""
        message, descriptors, _, _ = socket.recv_fds(self._control, 64, 2)
        if not message:
            os._exit(0)
        request, output = descriptors
        try:
            self._running[self._start(json.load(os.fdopen(os.dup(request))), output)] = int(message)
        except (OSError, ValueError) as error:
            self.say(number=int(message), error=str(error))
        finally:
            os.close(request)
            os.close(output)

    def _start(self, request: dict[str, Any], output: int) -> int:
        process = subprocess.Popen(
            ["/bin/sh", "-c", request["command"]],
            cwd=request["cwd"],
            env=request["env"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        process.returncode = 0  # `reap` collects it; Popen must not wait for it as well
        return process.pid

    def reap(self) -> None:
        """Reap all ended processes: commands, and orphans that process 1 adopted."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not pid:
                return
            if pid in self._running:
                self.say(number=self._running.pop(pid), exit_code=os.waitstatus_to_exitcode(status))


def become(user: int | None, processes: int | None) -> None:
    """Become the unprivileged user, and forbid other processes of that user to trace this one."""
    if processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


async def serve(control: socket.socket, listen: str, target: str) -> None:
    """Forward to the model if there is a target, and start commands until the sandbox ends."""
    starter, loop = Starter(control), asyncio.get_running_loop()
    loop.add_signal_handler(SIGCHLD, starter.reap)

    def ready() -> None:
        starter.say(ready=True)
        loop.add_reader(control, starter.take)

    if target:
        await relay.serve(listen, target, ready)
    else:
        ready()
        await loop.create_future()


def main() -> None:
    request = json.loads(sys.argv[1])
    become(request["user"], request["processes"])
    with socket.socket(fileno=request["control"]) as control:
        asyncio.run(serve(control, request["listen"], request["target"]))
