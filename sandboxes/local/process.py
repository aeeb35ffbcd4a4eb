"""Sandboxes that are plain processes: with their own directory, limits, a clean environment and a thorough end.

**This does not isolate.** A command runs as the user who started us and can read and write whatever that user can, and
reach the network. Use it for agents and tasks that you would run on this machine by hand.

The memory limit is the kernel's where a control group can be made (memory_group.py). Elsewhere, and for CPU time,
limits are checked twice a second over all processes of the sandbox, so a burst can pass them for half a second. Memory
is then resident memory instead of RLIMIT_AS: node and bun reserve far more addresses than they use and would not start.
Shared pages count once per process. Needs Linux (/proc, pidfd).
"""

import asyncio
import errno
import os
import re
import secrets
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from sandboxes.base import (
    MAX_COPY_MB,
    Ended,
    Limits,
    OnOutput,
    Result,
    Sandbox,
    SandboxError,
    Spec,
    TooMuchToCopy,
    User,
)
from sandboxes.clocks import time_up
from sandboxes.local import files, memory_group
from sandboxes.local.processes import FIRST_NAMESPACE, MARK, kill, namespace, now_ticks, processes_of, start_of, table
from sandboxes.local.removal import remove
from sandboxes.output import OutputPipe

WATCH_SECONDS = 0.5
PATIENCE_SECONDS = 10.0
PATIENT_LOOKS = 200
"""Least number of looks before a killed process counts as one that survives. Each takes CPU time: where a machine is so
busy that a killed process does not come to its end, this process does not come to its looks either."""
SANDBOX_ID = re.compile(r"([0-9]{1,20})-([0-9]{1,20})-[0-9a-f]{8}")
"""What `make_sandbox_directory` calls one: its owner's pid and start time, and a random part."""
ALONE = Spec()


def default_root() -> Path:
    """Return the directory of this user's sandboxes. It is outside any checkout: agents look for a repository above."""
    inside = (
        "" if namespace() == FIRST_NAMESPACE else f"-{namespace()}"
    )  # pids of other namespaces name other processes
    return Path(tempfile.gettempdir()) / f"blackforge-{os.getuid()}{inside}"


def is_our_directory(root: Path) -> bool:
    """Return whether a directory is this user's: in another user's, that user could replace what is in it."""
    try:
        state = root.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid()


def make_sandbox_directory(root: Path) -> Path:
    """Create a directory below `root`. Its name holds our pid and start time, so that leftovers are recognised."""
    directory = root / f"{os.getpid()}-{start_of(os.getpid())}-{secrets.token_hex(4)}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_our_directory(root):
            raise SandboxError(f"{root} is not a directory of this user; remove it, or set TMPDIR to another place")
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise SandboxError(f"the sandbox {directory} cannot be created ({error.strerror})") from error
    return directory


@dataclass
class _Running:
    """A command under watch."""

    sandbox: "ProcessSandbox"
    limits: Limits
    ended: "asyncio.Future[Ended]"
    cpu_before: float = 0.0
    """CPU seconds that processes which are still alive had used before it began."""

    def end(self, how: Ended) -> None:
        if not self.ended.done():
            self.ended.set_result(how)


class ProcessSandboxes:
    """Starts process sandboxes below one directory. One task reads /proc for the limits of all of them."""

    kind = "process"
    promise = "processes are separated by directory and environment only; they can do whatever this user can"
    away = ""
    away_seconds = 0.0
    making = ""

    def __init__(self, root: Path | None = None, model_url: str = "", bundles: Path | None = None):
        self.root = root or default_root()
        self._model_url, self._bundles = model_url, bundles or Path()
        self._running: list[_Running] = []
        self._watcher: asyncio.Task[None] | None = None

    async def start(self, spec: Spec = ALONE) -> "ProcessSandbox":
        if spec.image is not None or spec.network == "none" or spec.profile != "strict" or spec.services:
            asked = f"image {spec.image}, network {spec.network}, profile {spec.profile}"
            asked += f", services {[service.name for service in spec.services]}" if spec.services else ""
            raise SandboxError(f"a process sandbox has no image, network or root of its own ({asked}); use Docker")
        sandbox_id, directory = self._fresh("work", "home", "tmp")
        sandbox = ProcessSandbox(sandbox_id, directory, self.watch, spec.memory_mb)
        sandbox.limit_memory()
        sandbox.model_url, sandbox.bundles, sandbox.disk_mb = self._model_url, str(self._bundles), spec.disk_mb
        return sandbox

    def _fresh(self, *names: str) -> tuple[str, Path]:
        """Create a sandbox's directory with these subdirectories, and return its id and path."""
        directory = make_sandbox_directory(self.root)
        try:
            for name in names:
                (directory / name).mkdir(mode=0o700)
        except OSError as error:
            remove(directory)
            raise SandboxError(f"the sandbox {directory} cannot be created ({error.strerror})") from error
        return directory.name, directory

    async def was_away(self, since: float, sandbox: Sandbox | None = None) -> bool:
        return False

    async def until_there(self) -> None:
        """Return at once: there is no daemon that could be away."""

    async def close(self) -> None:
        """Nothing is shared."""

    def watch(self, running: _Running) -> None:
        """Hold a command to its CPU and memory limits until it has ended."""
        self._running.append(running)
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while self._running:
            await asyncio.sleep(WATCH_SECONDS)
            self._running = [running for running in self._running if not running.ended.done()]
            processes = table() if self._running else []
            for running in self._running:
                running.sandbox.forget_sessions()
                own = processes_of(processes, running.sandbox.id, running.sandbox.sessions)
                memory, cpu = running.sandbox.memory_mb, running.limits.cpu_seconds
                if running.sandbox.was_out_of_memory():
                    running.end("memory")
                elif (
                    memory is not None
                    and running.sandbox.group is None
                    and sum(process.memory_bytes for process in own) > memory << 20
                ):
                    running.end("memory")
                elif cpu is not None and sum(process.cpu_seconds for process in own) > cpu + running.cpu_before:
                    running.end("cpu")


class ProcessSandbox:
    """A directory with `work`, `home` and `tmp`, and the processes that carry its id in their environment."""

    own_root = False
    model_url = bundles = ""
    disk_mb: int | None = None
    """How many MB `get` copies out at most."""

    def __init__(self, sandbox_id: str, directory: Path, watch: Callable[[_Running], None], memory_mb: int | None):
        self.id, self.memory_mb = sandbox_id, memory_mb
        self.work, self.home = str(directory / "work"), str(directory / "home")
        self.sessions: dict[int, int] = {}
        """When each session had begun, in ticks. The leader of another one of this number starts later."""
        self.group: memory_group.MemoryGroup | None = None
        """What holds it to its memory limit. None: this process does."""
        self._kills = 0
        self._made_at = now_ticks()
        self._directory = directory
        self._watch = watch

    def limit_memory(self) -> None:
        """Let the kernel hold it to its memory limit, where it can."""
        if self.memory_mb is not None:
            self.group = memory_group.make(self.id, self.memory_mb << 20)

    def was_out_of_memory(self) -> bool:
        """Whether the kernel has ended a process for lack of memory since this was asked last."""
        before, self._kills = self._kills, 0 if self.group is None else self.group.kills()
        return self._kills > before

    def entering(self, argv: list[str]) -> list[str]:
        """Return the command line that runs `argv` within the memory limit."""
        return argv if self.group is None else self.group.enter(argv)

    def account(self, user: User) -> tuple[str, str] | None:
        return None

    async def run(
        self,
        command: str,
        limits: Limits,
        env: Mapping[str, str],
        user: User = "agent",
        on_output: OnOutput | None = None,
    ) -> Result:
        began = time.monotonic()
        output = OutputPipe(limits.output_bytes, on_output)
        loop = asyncio.get_running_loop()
        self.was_out_of_memory()  # what was killed before this command is not its own
        try:
            exit_code = await self._start(command, output, env)
            loop.add_reader(output.reader, lambda: output.read_available() or loop.remove_reader(output.reader))
            try:
                ended = await self._end_of(exit_code, limits)
                if ended == "exit" and self.was_out_of_memory():
                    ended = "memory"
                if ended != "exit":
                    await self.end_processes()
            finally:
                if not exit_code.done():  # cancelled, or ended just now
                    await self.end_processes()
                await exit_code
        finally:  # also where the command could not be started
            loop.remove_reader(output.reader)
            output.close()
        return Result(ended, exit_code.result(), output.text(), output.dropped, time.monotonic() - began)

    async def _start(self, command: str, output: OutputPipe, env: Mapping[str, str]) -> asyncio.Future[int]:
        """Start a command and return the future of its exit code."""
        clean = {MARK: self.id, "PATH": os.environ.get("PATH", os.defpath), "HOME": self.home, "PWD": self.work}
        clean |= {"TMPDIR": str(self._directory / "tmp"), "LANG": "C.UTF-8", "TERM": "dumb"}
        try:
            process = subprocess.Popen(
                self.entering(["/bin/sh", "-c", command]),
                cwd=self.work,
                env=clean | dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output.writer,
                stderr=output.writer,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            raise SandboxError(
                f"a command of {len(command)} bytes cannot be started in {self.work} ({error})"
            ) from error
        output.close_writer()
        self.sessions[process.pid] = now_ticks()
        return exit_code_of(process)

    def forget_sessions(self) -> None:
        """Forget sessions whose number the kernel has given to another process: theirs have no member any more."""
        self.sessions = {one: begun for one, begun in self.sessions.items() if (start_of(one) or 0) <= begun}

    async def _end_of(self, exit_code: asyncio.Future[int], limits: Limits) -> Ended:
        loop = asyncio.get_running_loop()
        running = _Running(self, limits, loop.create_future())
        exit_code.add_done_callback(lambda _: running.end("exit"))
        timing = asyncio.create_task(time_up(limits.seconds, limits.excused))
        timing.add_done_callback(lambda _: running.end("timeout"))
        if self.memory_mb is not None or limits.cpu_seconds is not None:
            running.cpu_before = self._cpu_used() if limits.cpu_seconds is not None else 0.0
            self._watch(running)
        try:
            return await running.ended
        finally:
            running.ended.cancel()
            timing.cancel()

    def _cpu_used(self) -> float:
        """Return CPU seconds that the next command's limit must not count: here 0, no process runs two."""
        return 0.0

    async def keep_processes(self) -> None:
        raise SandboxError(f"sandbox {self.id} cannot tell the task's daemons from the agent's; use Docker")

    async def allow_network(self) -> None:
        """Do nothing: it always has the network."""

    async def alone(self) -> bool:
        return False

    async def end_processes(self) -> int:
        killed: set[tuple[int, int]] = set()
        unsettled: set[int] | None = None
        deadline, looks = time.monotonic() + PATIENCE_SECONDS, 0
        used = bool(self.sessions)  # else no command has run since the last time
        while used:
            looks += 1
            self.forget_sessions()
            own, starting = kill(self.id, self.sessions, self._made_at)
            killed |= {(process.pid, process.started) for process in own}
            # Only a process that was starting in every look since the last one that found any can still be the
            # sandbox's: one that starts later is a child of the sandbox only if such a process is. What was found may
            # have forked before it was killed, so the look after that counts whatever is starting then.
            now = {process.pid for process in starting}
            unsettled = None if own else now if unsettled is None else unsettled & now
            late = time.monotonic() > deadline and looks > PATIENT_LOOKS
            if not own and (late or not unsettled):
                break
            if late:
                raise SandboxError(
                    f"{len(own)} processes of sandbox {self.id} survive SIGKILL, the first is {own[0].pid}"
                )
            await asyncio.sleep(0.002)  # a killed process leaves the table as soon as it is scheduled
        self.sessions.clear()
        return len(killed)

    async def write(self, path: str, content: str | bytes, user: User = "agent") -> None:
        place = self._place(path, user)
        try:
            files.write(place, content.encode() if isinstance(content, str) else content)
        except OSError as error:
            raise SandboxError(f"{path} cannot be written in sandbox {self.id} ({error.strerror})") from error

    async def read(self, path: str, limit: int = 1 << 20, user: User = "agent") -> bytes | None:
        return files.read(self._place(path, user), limit)

    async def put(self, source: Path, path: str, user: User = "agent") -> None:
        place = self._place(path, user)
        try:
            await asyncio.to_thread(files.put, source, place)
        except OSError as error:
            raise SandboxError(f"{source} cannot be copied to {path} in sandbox {self.id} ({error})") from error

    async def get(self, path: str, target: Path, user: User = "agent") -> None:
        place = self._place(path, user)
        try:
            await asyncio.to_thread(files.get, place, target, (self.disk_mb or MAX_COPY_MB) << 20)
        except OSError as error:
            raise SandboxError(f"{path} cannot be copied out of sandbox {self.id} ({error})") from error

    async def freeze(self) -> None:
        """End all processes: outside of Docker nothing has to stay."""
        await self.end_processes()

    async def thaw(self) -> None:
        """Do nothing: `freeze` has ended the processes."""

    async def restart(self) -> None:
        await self.end_processes()

    async def run_in_service(self, service: str, command: str, limits: Limits) -> Result:
        raise SandboxError(f"sandbox {self.id} has no service {service!r}; use Docker")

    async def pack(self, path: str, archive: IO[bytes], limit: int, service: str = "") -> bool:
        if service:
            raise SandboxError(f"sandbox {self.id} has no service {service!r}; use Docker")
        place = self._place(path)
        try:
            return await asyncio.to_thread(files.pack, place, archive, limit)
        except OSError as error:
            kind = TooMuchToCopy if error.errno == errno.EFBIG else SandboxError
            raise kind(f"{path} of sandbox {self.id} cannot be packed ({error})") from error

    async def changed(self) -> Mapping[str, bool]:
        return {}

    async def restore(self, paths: Sequence[str]) -> None:
        raise SandboxError(f"sandbox {self.id} has no image to put {len(paths)} paths back from; use Docker")

    async def stop(self) -> None:
        """Stop the sandbox. Goes on to the end when it is cancelled, so that nothing stays behind."""
        stopping = asyncio.create_task(self._stop())
        try:
            await asyncio.shield(stopping)
        except asyncio.CancelledError:
            await asyncio.wait([stopping])
            raise

    async def _stop(self) -> None:
        await self.end_processes()
        if self.group is not None:
            await asyncio.to_thread(self.group.remove)
        await asyncio.to_thread(remove, self._directory)

    def _place(self, path: str, user: User = "agent") -> files.SandboxPath:
        base, rest = ("home", path[2:]) if path.startswith("~/") else ("work", path)
        if not rest or rest.startswith("/") or ".." in Path(rest).parts or "\0" in rest:
            raise SandboxError(f"a path must lead into the sandbox, relative to its work directory or ~/: {path!r}")
        return files.SandboxPath(self._directory / base, Path(rest).parts)


def exit_code_of(process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
    """Return a future that gets the exit code of a process when it ends."""
    loop = asyncio.get_running_loop()
    code: asyncio.Future[int] = loop.create_future()
    exited = os.pidfd_open(process.pid)

    def reap() -> None:
        loop.remove_reader(exited)
        os.close(exited)
        status = process.wait()
        if not code.done():  # nobody waits any more
            code.set_result(status)

    loop.add_reader(exited, reap)
    return code
