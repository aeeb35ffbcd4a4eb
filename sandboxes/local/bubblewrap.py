"""Bubblewrap sandboxes: the host's programs, read-only, in separate namespaces. For machines without Docker.

A sandbox sees the host's /usr and /etc, its own home, working directory and /tmp, and the paths given as `shown`. It
sees no other home, no run directory and no socket but the proxy's. Without a network it has only the loopback. If root
starts it, everything inside runs under a user id of its own, drawn from a million.

One `bwrap` process makes the namespaces and starts process 1 in them (`bubblewrap_init.py`), which starts the commands.
Agent and verifier never share these: the verifier begins with new ones, over the same directories.

A filter of system calls (`system_calls.py`) refuses those that attacks on the kernel usually begin with.

Not prevented: attacks on the kernel through the other calls, a full disk, reading world-readable files in /etc.
CPUs are not limited. Memory is limited by a control group where there is one (`memory_group.py`), else checked twice a
second (`process.py`). Left out: images, services, root inside.
"""

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from sandboxes.base import Limits, OnOutput, Result, SandboxError, Spec, User
from sandboxes.local import system_calls
from sandboxes.local.files import SandboxPath
from sandboxes.local.process import ProcessSandbox, ProcessSandboxes, exit_code_of
from sandboxes.local.processes import MARK, now_ticks, processes_of, table
from sandboxes.network import forwarder
from sandboxes.output import OutputPipe

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc")
"""What every sandbox sees of this machine, as far as it exists."""
HIDDEN = ("/etc/ssh", "/etc/ssl/private", "/etc/docker", "/etc/sudoers.d")
"""Directories below those of SYSTEM that no sandbox needs; an empty one covers each."""
PATH = "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin"
LIBRARY = "/run/blackforge/lib"
"""Where the package `sandboxes` is mounted inside, for process 1 to import."""
WORK, HOME, VERIFIER_HOME = "/sandbox", "/home/agent", "/home/verifier"
"""WORK is a path that the host is unlikely to have: `shown` paths lie at the same place inside as outside."""
MOUNTED = {WORK: "work", "/tmp": "tmp", HOME: "home", VERIFIER_HOME: "verifier"}
"""Path inside -> name of the directory outside, for the sandbox's own directories."""
USERS = range(1_000_000, 2_000_000)
"""User ids for sandboxes that root starts. Archives in the old tar format hold ids below 2**21 only."""
ONLY_USER = 1000
"""User and group id inside, where an ordinary user starts the sandbox: its user namespace has no other."""
NO_ID = "none"
"""An id that no sandbox has, to find processes by their descent alone."""
SHARED_BYTES = 64 << 20
"""Size of /dev/shm, the only file system inside that is memory."""
PROBES = 3
"""Tries to start bubblewrap before it counts as not working: the probe binds the whole file system, in which mounts of
others, such as Docker's, come and go."""
PROGRAM = f"import sys; sys.path.insert(0, {LIBRARY!r}); from sandboxes.local.bubblewrap_init import main; main()"
"""The Python program that is process 1. Its argument is `SandboxView.start_message`."""


def why_not() -> str:
    """Return why bubblewrap does not work here; empty when it works."""
    if shutil.which("bwrap") is None:
        return "bwrap is not on PATH"
    if missing := system_calls.why_not():
        return missing
    why = ""
    for _ in range(PROBES):
        tried = subprocess.run(
            ["bwrap", "--unshare-all", "--ro-bind", "/", "/", "--proc", "/proc", "true"], capture_output=True, text=True
        )
        if tried.returncode == 0:
            return ""
        why = tried.stderr.strip()
    return why


class BubblewrapSandboxes(ProcessSandboxes):
    """Starts bubblewrap sandboxes.

    `model_socket`: the proxy's socket for sandboxes, alone in its directory; without one they reach no model.
    `shown`: files and directories that sandboxes may read, at the same paths as outside.
    """

    kind = "bubblewrap"
    promise = "isolated from this machine's files, processes and network; the kernel is shared, the disk not limited"

    def __init__(
        self,
        root: Path | None = None,
        *,
        model_socket: Path | None = None,
        bundles: Path | None = None,
        shown: Sequence[Path] = (),
    ):
        super().__init__(root, forwarder.URL, bundles)
        self._socket, self._shown = model_socket, tuple(path.absolute() for path in shown)

    async def start(self, spec: Spec = Spec()) -> "BubblewrapSandbox":  # noqa: B008 (frozen)
        if spec.image is not None or spec.profile != "strict" or spec.services:
            asked = f"image {spec.image}, profile {spec.profile}, services {[one.name for one in spec.services]}"
            raise SandboxError(f"a bubblewrap sandbox has no image, services or root of its own ({asked}); use Docker")
        sandbox_id, directory = self._fresh(*MOUNTED.values())
        # process 1 runs on this Python, whose files may lie outside of /usr; without bundles `_bundles` is Path()
        shown = [path for path in (Path(sys.base_prefix), self._bundles, *self._shown) if path.is_absolute()]
        view = SandboxView(spec, directory, shown, self._socket)
        sandbox = BubblewrapSandbox(sandbox_id, view, self.watch, spec.memory_mb)
        sandbox.bundles, sandbox.disk_mb = str(self._bundles), spec.disk_mb
        sandbox.limit_memory()
        try:
            await sandbox.begin()
        except BaseException:  # cancelled as well: what has begun must not stay
            await sandbox.stop()
            raise
        return sandbox


@dataclass
class SandboxView:
    """What a sandbox sees, and the user it runs as."""

    spec: Spec
    directory: Path
    shown: Sequence[Path]
    socket: Path | None
    user: int | None = field(default_factory=lambda: secrets.choice(USERS) if os.getuid() == 0 else None)
    """User id inside. None: ONLY_USER, which is the user who started us, alone in a user namespace."""

    @property
    def model_socket(self) -> Path | None:
        """The proxy's socket, where the sandbox may reach it."""
        return self.socket if self.spec.network == "model" else None

    def arguments(self, side: User) -> list[str]:
        """Return bwrap's arguments up to the program. The verifier has a home that the agent never sees.

        bwrap mounts in the order of its arguments, so what covers a part of a mount comes after it.
        """
        return [*self._namespaces(), *self._system(), *self._own(side), "--remount-ro", "/", "--chdir", "/"]

    def _namespaces(self) -> Iterator[str]:
        yield from ("--die-with-parent", "--as-pid-1", "--new-session", "--hostname", "sandbox", "--cap-drop", "ALL")
        yield from ("--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try")
        if self.spec.network != "full":
            yield "--unshare-net"
        if self.user is None:
            yield from ("--unshare-user", "--uid", f"{ONLY_USER}", "--gid", f"{ONLY_USER}")
        else:  # process 1 becomes `user` with these before it does anything else, and so gives them up
            yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID")

    def _system(self) -> Iterator[str]:
        for path in map(Path, SYSTEM):
            if path.is_symlink():
                yield from ("--symlink", str(path.readlink()), str(path))
            elif path.exists():
                yield from ("--ro-bind", str(path), str(path))
        for name in HIDDEN:
            if Path(name).is_dir():
                yield from ("--tmpfs", name, "--remount-ro", name)
        yield from ("--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", f"{SHARED_BYTES}")
        yield from ("--tmpfs", "/dev/shm", "--remount-ro", "/dev")
        yield from ("--perms", "0755", "--dir", "/var", "--symlink", "/tmp", "/var/tmp")

    def _own(self, side: User) -> Iterator[str]:
        for target, name in MOUNTED.items():
            if target != VERIFIER_HOME or side == "verifier":
                yield from _bound("--bind", self.directory / name, target)
        yield from ("--ro-bind", str(self.directory / "passwd"), "/etc/passwd")
        yield from _bound("--ro-bind", Path(__file__).parent.parent, f"{LIBRARY}/sandboxes")
        for path in self.shown:
            if path.exists() and not path.is_relative_to("/usr"):  # /usr is there already
                yield from _bound("--ro-bind", path, str(path))
        if self.model_socket is not None:
            yield from _bound("--ro-bind", self.model_socket.parent, forwarder.DIRECTORY)
        resolver = Path("/etc/resolv.conf").resolve()  # often a link to a file in /run
        if self.spec.network == "full" and not resolver.is_relative_to("/etc") and resolver.exists():
            yield from _bound("--ro-bind", resolver, str(resolver))

    def start_message(self, control: int) -> str:
        """Return the JSON argument that process 1 starts with (sandboxes/local/bubblewrap_init.py).

        `control`: the descriptor of its socket, on which requests arrive.
        """
        target = "" if self.model_socket is None else f"unix:{forwarder.DIRECTORY}/{self.model_socket.name}"
        message = {"control": control, "user": self.user, "processes": self.spec.pids}
        return json.dumps(message | {"listen": forwarder.LISTEN, "target": target})

    def prepare(self) -> None:
        """Hand the directories to the user inside and write a passwd file with its name. OSError when that fails."""
        inside = ONLY_USER if self.user is None else self.user
        (self.directory / "passwd").write_text(
            f"root:x:0:0:root:/:/usr/sbin/nologin\nagent:x:{inside}:{inside}:agent:{HOME}:/bin/sh\n"
        )
        if self.user is not None:
            for name in MOUNTED.values():
                os.chown(self.directory / name, self.user, self.user)


def _bound(how: str, source: Path, target: str) -> Iterator[str]:
    """Yield the arguments of a mount whose parent directories everybody may enter: bwrap alone would make them 0700."""
    for parent in reversed(Path(target).parents[:-1]):
        if not parent.is_relative_to("/etc"):  # mounted read-only before, with its directories
            yield from ("--perms", "0755", "--dir", str(parent))
    yield from (how, str(source), target)


class _Namespace:
    """A sandbox's processes: bwrap, process 1, and all that process 1 started."""

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, side: User):
        self.process, self.side = process, side
        """bwrap, and for whom it was started."""
        self.gone = exit_code_of(process)
        """The exit code of bwrap, once it has ended."""
        self.ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True once process 1 takes commands; False when it has ended before that."""
        self._control = control
        self._commands: dict[int, asyncio.Future[int]] = {}
        """Number of a request -> exit code of its command, for those that have not ended."""
        self._started = 0
        self._following = asyncio.create_task(self._follow())

    def start(self, request: Mapping[str, object], output: int) -> asyncio.Future[int]:
        """Ask process 1 to start a command. The future gets its exit code, or SandboxError if it cannot be started.

        OSError when process 1 has ended. The request goes into a file, as it may be larger than a message can be.
        """
        self._started += 1
        file = os.memfd_create("request")
        try:
            os.write(file, json.dumps(request).encode())
            os.lseek(file, 0, os.SEEK_SET)
            socket.send_fds(self._control, [b"%d" % self._started], [file, output])
        finally:
            os.close(file)
        return self._commands.setdefault(self._started, asyncio.get_running_loop().create_future())

    async def _follow(self) -> None:
        """Take the messages of process 1 until it has ended. Then all commands have ended with it."""
        loop = asyncio.get_running_loop()
        with suppress(ConnectionError):
            while message := await loop.sock_recv(self._control, 1 << 16):
                self._hear(json.loads(message))
        self._control.close()
        if not self.ready.done():
            self.ready.set_result(False)
        for command in self._commands.values():
            if not command.done():
                command.set_result(-signal.SIGKILL)

    def _hear(self, message: dict[str, Any]) -> None:
        if "ready" in message:
            self.ready.set_result(True)
            return
        command = self._commands.pop(message["number"])
        if command.done():
            return
        if "error" in message:
            command.set_exception(SandboxError(f"a command cannot be started ({message['error']})"))
        else:
            command.set_result(message["exit_code"])

    async def end(self) -> int:
        """End all processes. Return how many there were besides bwrap and process 1; 0 if bwrap was killed before.

        The kernel ends all others with process 1, and bwrap ends after it.
        """
        own = processes_of(table(), NO_ID, {self.process.pid})
        first = [process.pid for process in own if process.parent == self.process.pid]
        for pid in first:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not first:  # bwrap has not come to process 1 yet, or has ended
            self.process.kill()
        await asyncio.shield(self.gone)
        # Process 1 ends when its socket does. Where somebody killed bwrap, it may be alive, although bwrap has
        # --die-with-parent: the kernel forgets that when process 1 changes its user.
        with suppress(OSError):  # closed already
            self._control.shutdown(socket.SHUT_WR)
        await self._following
        return sum(process.pid not in (self.process.pid, *first) for process in own)


class BubblewrapSandbox(ProcessSandbox):
    """Directories of this machine, with namespaces in which processes see them as their own file system."""

    own_root = True

    def __init__(self, sandbox_id: str, view: SandboxView, watch: Any, memory_mb: int | None):
        super().__init__(sandbox_id, view.directory, watch, memory_mb)
        self.work, self.home = WORK, HOME
        self.model_url = "" if view.model_socket is None else forwarder.URL
        self._view = view
        self._namespace: _Namespace | None = None

    async def allow_network(self) -> None:
        """Give it the host's network. It ends the processes: namespaces that exist keep their network."""
        await self.end_processes()
        self._view = replace(self._view, spec=replace(self._view.spec, network="full"))

    async def begin(self, side: User = "agent") -> None:
        """Make new namespaces for a side, in place of those that there are. SandboxError when that fails."""
        if self._namespace is not None:
            await self.end_processes()
        log = self._directory / "bwrap.log"
        try:
            self._view.prepare()
            self._namespace = self._new_namespace(side, log)
        except OSError as error:
            raise SandboxError(f"bubblewrap cannot start sandbox {self.id} ({error})") from error
        self.sessions[self._namespace.process.pid] = now_ticks()
        if not await asyncio.shield(self._namespace.ready):
            lines = log.read_text(errors="replace").strip().splitlines() or ["it printed nothing"]
            raise SandboxError(f"bubblewrap cannot start sandbox {self.id} ({lines[-1]})")

    def _new_namespace(self, side: User, log: Path) -> _Namespace:
        """Start bwrap, which writes what is wrong to `log`. OSError when that fails."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs, log.open("wb") as errors, TemporaryFile() as call_filter:
                call_filter.write(system_calls.program(self._view.spec.system_calls))
                call_filter.seek(0)
                # found on our own PATH, as in `why_not`: Popen would look on that of `env`, which has none
                command = [shutil.which("bwrap") or "bwrap", "--seccomp", f"{call_filter.fileno()}"]
                command += [*self._view.arguments(side), os.path.realpath(sys.executable), "-I", "-S", "-c", PROGRAM]
                process = subprocess.Popen(
                    self.entering([*command, self._view.start_message(theirs.fileno())]),
                    env={MARK: self.id},
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    pass_fds=(theirs.fileno(), call_filter.fileno()),
                    start_new_session=True,
                )
        except BaseException:  # `_Namespace` closes it otherwise
            ours.close()
            raise
        return _Namespace(process, ours, side)

    async def run(
        self,
        command: str,
        limits: Limits,
        env: Mapping[str, str],
        user: User = "agent",
        on_output: OnOutput | None = None,
    ) -> Result:
        """See Sandbox. A command of the other side ends all processes first, and gets namespaces of its own."""
        side: User = "verifier" if user == "verifier" else "agent"
        if self._namespace is None or self._namespace.side != side or self._namespace.gone.done():
            await self.begin(side)
        return await super().run(command, limits, env, user, on_output)

    async def _start(self, command: str, output: OutputPipe, env: Mapping[str, str]) -> asyncio.Future[int]:
        assert self._namespace is not None
        home = VERIFIER_HOME if self._namespace.side == "verifier" else HOME
        clean = {MARK: self.id, "PATH": PATH, "HOME": home, "PWD": WORK, "TMPDIR": "/tmp", "USER": "agent"}
        clean |= {"LANG": "C.UTF-8", "TERM": "dumb"} | system_calls.environment(self._view.spec.system_calls)
        request = {"command": command, "cwd": WORK, "env": clean | dict(self._view.spec.env) | dict(env)}
        try:
            started = self._namespace.start(request, output.writer)
        except OSError as error:
            await self.end_processes()  # as a rule, process 1 has ended; the next command gets new namespaces
            raise SandboxError(f"a command cannot be started in sandbox {self.id} ({error})") from error
        output.close_writer()
        return started

    def _cpu_used(self) -> float:
        """Return CPU seconds. Process 1 has reaped all earlier commands, so its own count includes them."""
        return sum(process.cpu_seconds for process in processes_of(table(), self.id, self.sessions))

    def _place(self, path: str, user: User = "agent") -> SandboxPath:
        """Return where a path of the sandbox lies outside. SandboxError when it is not below one of MOUNTED."""
        if path.startswith("/"):
            mounted = next((at for at in MOUNTED if Path(path).is_relative_to(at) and Path(path) != Path(at)), None)
            if mounted is None:
                raise SandboxError(
                    f"a path must be below one of {', '.join(MOUNTED)} in a bubblewrap sandbox: {path!r}"
                )
            base, path = self._directory / MOUNTED[mounted], str(Path(path).relative_to(mounted))
        elif path.startswith("~/"):
            base, path = self._directory / ("verifier" if user == "verifier" else "home"), path[2:]
        else:
            base = self._directory / "work"
        # the check that it leads into `base` is that of a process sandbox
        return SandboxPath(base, super()._place(path).parts, self._view.user)

    async def end_processes(self) -> int:
        namespace, self._namespace = self._namespace, None
        self.sessions.clear()
        return 0 if namespace is None else await namespace.end()
