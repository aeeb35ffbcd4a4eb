"""A shell that stays open: directory, variables, functions and jobs go on from one command to the next.

It is opened by the first command, and ends by `exit`, by a limit (which ends everything in the sandbox) or with the
sandbox's `end_processes`; the command after that opens another, which knows nothing of the former. Left out: what jobs
write between two commands.
"""

import asyncio
import secrets
import shlex
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

from sandboxes.base import Limits, OnOutput, Result, SandboxError, User
from sandboxes.docker.sandbox import GRACE_SECONDS, DockerSandbox
from sandboxes.output import Kept

OPEN = ("/bin/sh", "-c", "exec /bin/sh 2>&1")


class Shell:
    """One user's shell in a sandbox. Commands are run one at a time."""

    def __init__(self, sandbox: DockerSandbox, env: Mapping[str, str], user: User = "agent"):
        self._sandbox, self._env, self._user = sandbox, env, user
        self._input: asyncio.Queue[bytes] = asyncio.Queue()
        self._process: asyncio.Task[int] | None = None
        self._reply: _Reply | None = None

    async def run(self, command: str, limits: Limits, on_output: OnOutput | None = None) -> Result:
        """Run one command to its end."""
        if "\0" in command:
            raise SandboxError(f"a command holds a NUL: {command[:80]!r}")
        if self._process is None or self._process.done():
            self._process = self._open()
        began = time.monotonic()
        kept = Kept(limits.output_bytes, on_output)
        self._reply = reply = _Reply(kept)
        # `command` keeps the shell alive after a syntax error; the command must not read what is meant for the shell.
        self._input.put_nowait(
            f"command eval {shlex.quote(command)} </dev/null\nprintf '\\n%s %d\\n' {reply.mark} $?\n".encode()
        )
        ended, code = await self._sandbox.finish(asyncio.create_task(self._code(self._process, reply)), limits)
        reply.flush()
        return Result(ended, code, kept.text(), kept.dropped, time.monotonic() - began)

    async def close(self) -> None:
        """End the shell, though not what it has started in the background."""
        if self._process is None:
            return
        self._input.put_nowait(b"exit\n")
        await asyncio.wait({self._process}, timeout=GRACE_SECONDS)
        self._process.cancel()
        await asyncio.gather(self._process, return_exceptions=True)
        self._process = None

    def _open(self) -> "asyncio.Task[int]":
        self._input = asyncio.Queue()
        command = replace(self._sandbox.command(OPEN, self._user, self._env), stdin=_lines(self._input))
        execution = self._sandbox.engine.execute(self._sandbox.container, command, self._take)
        return asyncio.create_task(execution)

    def _take(self, chunk: bytes) -> None:
        if self._reply is not None:
            self._reply.add(chunk)

    async def _code(self, process: "asyncio.Task[int]", reply: "_Reply") -> int:
        await asyncio.wait({process, reply.code}, return_when=asyncio.FIRST_COMPLETED)
        return reply.code.result() if reply.code.done() else process.result()


class _Reply:
    """What a shell writes for one command, up to the line that says how it ended."""

    def __init__(self, kept: Kept):
        self.mark = secrets.token_hex(16)
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._kept = kept
        self._line = f"\n{self.mark} ".encode()
        self._held = b""

    def add(self, chunk: bytes) -> None:
        if self.code.done():
            return
        text = self._held + chunk
        output, found, rest = text.partition(self._line)
        if found and b"\n" in rest:
            self._kept.add(output)
            self._held = b""
            self.code.set_result(int(rest.split(b"\n")[0]))
            return
        held = len(text) - len(output) if found else self._begun(text)
        self._kept.add(text[: len(text) - held])
        self._held = text[len(text) - held :]

    def flush(self) -> None:
        """The shell has ended: what looked like the line's beginning was none."""
        self._kept.add(self._held)
        self._held = b""

    def _begun(self, text: bytes) -> int:
        """How many bytes at the end may be the beginning of the line."""
        return next((size for size in range(len(self._line) - 1, 0, -1) if text.endswith(self._line[:size])), 0)


async def _lines(waiting: "asyncio.Queue[bytes]") -> AsyncIterator[bytes]:
    while True:
        yield await waiting.get()
