"""One container as a sandbox. Its main process only keeps it alive; everything else is a command in it.

A command's stderr goes to its stdout, so its output is one stream. Exit codes of 128 and more are a shell's codes for
signals. If a command leaves a process behind that holds the output open, the daemon delays the command's end by two
seconds. Known gap: if a command is killed by SIGKILL and an earlier process was killed for lack of memory unnoticed,
the result says `memory`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from sandboxes.base import MAX_COPY_MB, Ended, Limits, OnOutput, Result, SandboxError, User
from sandboxes.clocks import time_up
from sandboxes.docker.container import beside, freezing
from sandboxes.docker.container import restore as originals
from sandboxes.docker.container.end_mark import EndMark
from sandboxes.docker.container.files import ContainerFiles
from sandboxes.docker.container.processes import COMMAND, END, MERGED, OOM_KILLS, PARENTS, TABLE, only_main
from sandboxes.docker.daemon import ContainerCommand, DaemonError, DockerDaemon
from sandboxes.docker.profiles import UserAccount
from sandboxes.docker.services import service_container
from sandboxes.output import BoundedOutput

PATIENCE_SECONDS = 180.0
"""Time to end all processes. A fork bomb takes CPU time from the script that ends it."""
GRACE_SECONDS = 10.0
"""Time for a command to end after its processes have been ended."""
KILLED = 137
"""Exit code of a command that SIGKILL has ended, as a shell reports it."""
LONGEST_COMMAND = (128 << 10) - len(f"{COMMAND}=")
"""Bytes from which on Linux refuses a command in an environment variable."""


@dataclass(frozen=True, kw_only=True)
class StartedContainer:
    """Describes a started container."""

    id: str
    """Id of the sandbox, also part of the container's name."""
    container: str
    work: str
    accounts: Mapping[User, UserAccount]
    model_url: str
    bundles: str
    disk_mb: int | None
    cpus: float
    """Maximum CPU seconds per second."""
    labels: Mapping[str, str]
    """Labels of everything that belongs to the sandbox."""
    writable: bool
    """Whether its root file system can be written."""
    networked: bool
    """Whether it begins with a full network."""
    connect: Callable[[], Coroutine[None, None, None]]
    """Gives it a full network."""
    places: Sequence[str] = ()
    """Where its root cannot be written: the places that can, each a volume in memory."""
    holder: Mapping[str, Any] | None = None
    """Configuration of the container that keeps these volumes while this one restarts."""
    services: Sequence[str] = ()
    """Names of the services beside it."""
    ready: Callable[[str, float], Awaitable[None]] | None = None
    """Waits until the main process works that was started after this time (seconds since the epoch)."""


class DockerSandbox:
    """A running container. DockerSandboxes starts one."""

    own_root = True

    def __init__(
        self, daemon: DockerDaemon, started: StartedContainer, remove: Callable[[], Coroutine[None, None, None]]
    ):
        self.id, self.work, self.home = started.id, started.work, started.accounts["agent"].home
        self.model_url, self.bundles = started.model_url, started.bundles
        self.container = started.container
        self.daemon, self._started = daemon, started
        self._kept: Sequence[str] = ()
        """Processes that `end_processes` spares, as `pid:start`."""
        self._networked = started.networked
        self._killed = False
        """Whether its processes were killed to halt it. Then the holder keeps its volumes."""
        self._oom_kills = 0
        self._remove = remove
        self._removal: asyncio.Task[None] | None = None

    def account(self, user: User) -> tuple[str, str]:
        return self._started.accounts[user].home, self._ids(user)

    async def run(
        self,
        command: str,
        limits: Limits,
        env: Mapping[str, str],
        user: User = "agent",
        on_output: OnOutput | None = None,
    ) -> Result:
        if len(command.encode()) >= LONGEST_COMMAND or "\0" in command:
            raise SandboxError(
                f"a command of {len(command)} characters cannot be run in sandbox {self.id}; Linux takes less than "
                f"{LONGEST_COMMAND} bytes, without NUL: put long text in files"
            )
        began = self._clock()
        kept = BoundedOutput(limits.output_bytes, on_output)
        mark = EndMark(kept.add)
        inside = mark.on(self.command(("/bin/sh", "-c", MERGED, "sh"), user, {**env, COMMAND: command}))
        running = asyncio.create_task(self.daemon.execute(self.container, inside, mark.add))
        ended, code = await self.finish(running, limits)
        cut = mark.end(code) and ended == "exit"
        return Result(ended, code, kept.text(cut), kept.dropped, self._clock() - began, cut)

    def command(self, argv: Sequence[str], user: User, env: Mapping[str, str]) -> ContainerCommand:
        """Return a command of this user in the working directory."""
        account = self._started.accounts[user]
        own = {"HOME": account.home, "USER": account.name, "LOGNAME": account.name}
        return ContainerCommand(argv=argv, user=account.ids, work=self.work, env=own | dict(env))

    async def finish(self, running: "asyncio.Task[int]", limits: Limits) -> tuple[Ended, int]:
        """Wait for a running command. At the first limit, end it with all other processes of the sandbox."""
        try:
            ended = await self._end_of(running, limits)
            code = running.result() if ended == "exit" else -9
            if code == KILLED and await self._was_out_of_memory():
                ended, code = "memory", -9
        except BaseException:  # also when cancelled: the command must not go on without us
            await self._abandon(running)
            raise
        if ended != "exit":
            await self._abandon(running)
        return ended, code

    def _clock(self) -> float:
        """The time, which stands still while the daemon is away: nobody could see then that a command has ended."""
        return time.monotonic() - self.daemon.presence.away_seconds

    async def _end_of(self, running: "asyncio.Task[int]", limits: Limits) -> Ended:
        async def excused() -> float:
            await self.daemon.presence.until_there()
            return await limits.excused()

        spending = asyncio.create_task(self._spend(limits.cpu_seconds))
        timing = asyncio.create_task(time_up(limits.seconds, excused, self._clock))
        try:
            await asyncio.wait({running, spending, timing}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                return "exit"
            (spending if spending.done() else timing).result()
            return "cpu" if spending.done() else "timeout"
        finally:
            spending.cancel()
            timing.cancel()

    async def _spend(self, cpu_seconds: float | None) -> None:
        """Return when the container's processes have used this much CPU time."""
        if cpu_seconds is None:
            await asyncio.Event().wait()
        used = await self._cpu_seconds()
        end = used + (cpu_seconds or 0)
        while used < end:
            await asyncio.sleep((end - used) / self._started.cpus)  # it cannot be used up sooner
            used = await self._cpu_seconds()

    async def _cpu_seconds(self) -> float:
        with self.daemon.translating_errors(f"the CPU time of {self.container}"):
            (stats,) = await self.daemon.container(self.container).stats(stream=False)
        return stats["cpu_stats"]["cpu_usage"]["total_usage"] / 1e9

    async def _was_out_of_memory(self) -> bool:
        """Whether the kernel has ended a process for lack of memory since this was asked last."""
        try:
            before, count = self._oom_kills, await self._script(OOM_KILLS)
            self._oom_kills = int(count.split()[0]) if count else before
            return self._oom_kills > before
        # The whole container may have ended of it, or an agent that is root has replaced the programs that count.
        except (SandboxError, ValueError, IndexError):
            with self.daemon.translating_errors(f"the end of {self.container}"):
                state = (await self.daemon.container(self.container).show())["State"]
            return bool(state["OOMKilled"])

    async def _abandon(self, running: "asyncio.Task[int]") -> None:
        """End a command that must not go on, with all that it started."""
        with suppress(SandboxError):
            await self.end_processes()
        await asyncio.wait({running}, timeout=GRACE_SECONDS)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def keep_processes(self) -> None:
        self._kept = (await self._script(TABLE)).split()

    async def alone(self) -> bool:
        with suppress(SandboxError), self.daemon.translating_errors(f"the processes of {self.container}"):
            listed = await self.daemon.container(self.container).top(ps_args=PARENTS)
            return only_main((int(pid), int(parent)) for pid, parent in listed["Processes"])
        return False  # the daemon's machine may have no ps

    async def end_processes(self) -> int:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                last = (await self._script(END, *self._kept)).split()
                return int(last[-1])
            except DaemonError:
                raise
            except (SandboxError, ValueError, IndexError) as error:  # no process was free for it, or it was ended
                if not await self._runs():
                    return 0
                if time.monotonic() > deadline:
                    raise SandboxError(f"the processes of sandbox {self.id} cannot be ended ({error})") from error
            await asyncio.sleep(0.05)

    async def _runs(self) -> bool:
        try:
            with self.daemon.translating_errors(f"the state of {self.container}"):
                return bool((await self.daemon.container(self.container).show())["State"]["Running"])
        except DaemonError:
            raise
        except SandboxError:  # it is gone
            return False

    async def _script(self, script: str, *arguments: str) -> str:
        """Run one of our own scripts as root and return its output."""
        output = BoundedOutput(1 << 20)
        mark = EndMark(output.add)
        command = ContainerCommand(argv=("/bin/sh", "-c", script, "sh", *arguments), user=self._ids("root"))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                code = await self.daemon.execute(self.container, mark.on(command), mark.add)
        except TimeoutError as error:
            raise SandboxError(f"a command of ours in sandbox {self.id} does not end") from error
        if mark.end(code):
            raise SandboxError(f"the Docker daemon lost the end of what a command of ours in sandbox {self.id} said")
        if code:
            raise SandboxError(
                f"a command of ours in sandbox {self.id} ended by exit code {code}: {output.text()[-200:]}"
            )
        return output.text()

    async def write(self, path: str, content: str | bytes, user: User = "agent") -> None:
        await self._files(user).write(
            self._inside(path, user), content.encode() if isinstance(content, str) else content
        )

    async def read(self, path: str, limit: int = 1 << 20, user: User = "agent") -> bytes | None:
        return await self._files(user).read(self._inside(path, user), limit)

    async def put(self, source: Path, path: str, user: User = "agent") -> None:
        await self._files(user).put(source, self._inside(path, user))

    async def get(self, path: str, target: Path, user: User = "agent") -> None:
        limit = self._started.disk_mb or MAX_COPY_MB
        await self._files(user).get(self._inside(path, user), target, limit << 20)

    def _files(self, user: User) -> ContainerFiles:
        return ContainerFiles(self.daemon, self.container, self._ids(user))

    async def allow_network(self) -> None:
        if not self._networked:
            await self._started.connect()
        self._networked = True

    async def freeze(self) -> None:
        if not self._killed:
            self._killed = await freezing.freeze(self.daemon, self.container, self._started.holder)

    async def thaw(self) -> None:
        if self._killed:
            await self.restart()
        else:
            await freezing.thaw(self.daemon, self.container)

    async def restart(self) -> None:
        if not self._killed:
            await freezing.kill(self.daemon, self.container, self._started.holder)
        self._killed = True
        if self._networked:  # so that nothing in it has a network before its routes are restricted
            with self.daemon.translating_errors(f"the network of {self.container}"):
                await (await self.daemon.docker.networks.get("bridge")).disconnect({"Container": self.container})
        ended = await freezing.start_again(self.daemon, self.container)
        self._killed, self._kept, self._oom_kills = False, (), 0
        if self._networked:
            await self._started.connect()
        if self._started.ready is not None:
            await self._started.ready(self.container, ended)

    async def run_in_service(self, service: str, command: str, limits: Limits) -> Result:
        return await beside.run(self.daemon, self._service(service), command, limits)

    def _service(self, name: str) -> str:
        if name not in self._started.services:
            raise SandboxError(f"sandbox {self.id} has no service {name!r}")
        return service_container(self.container, name)

    async def pack(self, path: str, archive: IO[bytes], limit: int, service: str = "") -> bool:
        if service:
            return await beside.pack(self.daemon, self._service(service), path, archive, limit)
        full = str(PurePosixPath(self._inside(path, "agent")))
        if self._started.writable:
            return await freezing.pack(self.daemon, self.container, full, full, archive, limit)
        container = freezing.holder_of(self.container) if self._killed else self.container
        around = [place for place in self._started.places if PurePosixPath(full).is_relative_to(place)]
        if not around:
            raise SandboxError(f"nobody can write to {full} in a strict sandbox; its places are {self._started.places}")
        return await freezing.pack(self.daemon, container, full, max(around, key=len), archive, limit)

    async def changed(self) -> Mapping[str, bool]:
        return await originals.changed(self.daemon, self.container) if self._started.writable else {}

    async def restore(self, paths: Sequence[str]) -> None:
        await originals.restore(self.daemon, self.container, self._started.labels, paths)

    async def stop(self) -> None:
        """Remove the container. If cancelled, the removal goes on, and `DockerSandboxes.close` waits for it."""
        if self._removal is None or (self._removal.done() and self._removal.exception()):
            self._removal = asyncio.create_task(self._remove())
        await asyncio.shield(self._removal)

    def _ids(self, user: User) -> str:
        return self._started.accounts[user].ids

    def _inside(self, path: str, user: User) -> str:
        home = path.startswith("~/")
        rest = path[2:] if home else path
        if not rest.strip("/") or ".." in Path(rest).parts or "\0" in rest or (home and rest.startswith("/")):
            raise SandboxError(f"a path must lead into the sandbox, without `..`: {path!r}")
        base = self._started.accounts[user].home if home else self.work
        return rest if rest.startswith("/") else f"{base.rstrip('/')}/{rest}"
