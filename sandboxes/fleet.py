"""Several hosts as one: starts each sandbox on the host with most room, and avoids a host for a while after it fails.

A host's share of the sandboxes follows its weight; a limit bounds how many it has at a time. A start that fails because
of the host (its daemon is gone, its disk is full) is repeated on the others before the caller sees an error. A later
failure ends only that sandbox, but its host is avoided too. A host returns when a start on it succeeds. With one host,
or when all are avoided, the one that is due next is tried at once. Left out: what other processes run on the hosts.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeVar

from sandboxes.base import ImageError, Limits, OnOutput, Result, Sandbox, SandboxError, Sandboxes, Spec, User
from sandboxes.docker.daemon import DaemonError
from sandboxes.metrics import SandboxMetrics

OUT_SECONDS = 30.0
"""How long a host is avoided after a failure. Doubles with each further failure in a row."""
MAX_OUT_SECONDS = 480.0
Open = Callable[[str], Awaitable[Sandboxes]]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HostOptions:
    """Settings of one host."""

    address: str
    weight: float = 1.0
    limit: int | None = None
    """Maximum sandboxes at a time. None: no limit."""


def parse_host(text: str) -> HostOptions:
    """Parse ADDRESS[=WEIGHT[/LIMIT]]. ValueError, with a sentence, for anything else."""
    address, _, rest = text.rpartition("=") if "=" in text else (text, "", "")
    weight, _, limit = rest.partition("/")
    try:
        options = HostOptions(address=address, weight=float(weight or 1), limit=int(limit) if limit else None)
    except ValueError:
        options = None
    if (
        options is None
        or not address
        or not 0 < options.weight < 1e6
        or (options.limit is not None and options.limit < 1)
    ):
        raise ValueError(f"a host is ADDRESS, ADDRESS=WEIGHT or ADDRESS=WEIGHT/LIMIT with both above 0, not: {text}")
    return options


@dataclass
class _Host:
    """One host and its state."""

    options: HostOptions
    sandboxes: Sandboxes | None = None
    used: int = 0
    out_until: float = 0.0
    """Avoid it until this moment of the monotonic clock, unless all are avoided."""
    failed: int = 0
    """Failures in a row."""
    opening: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while connecting, so that starts at the same time open one connection, not one each."""

    @property
    def full(self) -> bool:
        return self.options.limit is not None and self.used >= self.options.limit

    @property
    def share(self) -> float:
        """Return sandboxes per weight, with one more than now. The lowest share is chosen."""
        return (self.used + 1) / self.options.weight


class Hosts:
    """Starts sandboxes on several hosts."""

    def __init__(
        self, hosts: Sequence[HostOptions], open: Open, *, kind: str = "docker", out_seconds: float = OUT_SECONDS
    ):
        self.kind = kind
        self.metrics = SandboxMetrics()
        self._out_seconds = out_seconds
        self._hosts = [_Host(options) for options in hosts]
        self._open = open
        self._freed = asyncio.Condition()  # guards `used` of the hosts; notified when a place becomes free
        self._preceding = 0
        """Starts that take the next place before all others."""

    @property
    def promise(self) -> str:
        return next((host.sandboxes.promise for host in self._hosts if host.sandboxes), "nothing is started yet")

    @property
    def away(self) -> str:
        """A sentence while all hosts are away."""
        sentences = [host.sandboxes.away for host in self._hosts if host.sandboxes is not None]
        return sentences[0] if sentences and len(sentences) == len(self._hosts) and all(sentences) else ""

    @property
    def away_seconds(self) -> float:
        """The longest of the hosts' absences."""
        return max((host.sandboxes.away_seconds for host in self._hosts if host.sandboxes is not None), default=0.0)

    @property
    def making(self) -> str:
        """What each host that makes images says."""
        return "; ".join(text for host in self._hosts if host.sandboxes is not None and (text := host.sandboxes.making))

    async def was_away(self, since: float, sandbox: Sandbox | None = None) -> bool:
        """Whether the sandbox's host was away; without a sandbox, all hosts: a start tries one after the other."""
        asked = [self._host_of(sandbox)] if sandbox is not None else self._hosts
        answers = [host.sandboxes.was_away(since) for host in asked if host.sandboxes is not None]
        return bool(answers) and all(await asyncio.gather(*answers))

    def _host_of(self, sandbox: Sandbox) -> _Host:
        return next(host for host in self._hosts if host.options.address == getattr(sandbox, "host", None))

    async def until_there(self) -> None:
        """Wait until one host is there that was opened."""
        waiting = [asyncio.ensure_future(host.sandboxes.until_there()) for host in self._hosts if host.sandboxes]
        try:
            for first in asyncio.as_completed(waiting):
                try:
                    return await first
                except SandboxError as error:
                    last = error
            if waiting:
                raise last
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def check(self) -> list[str]:
        """Connect to all hosts and say what is wrong with some; DaemonError when none is of use."""
        errors = []
        for host in self._hosts:
            try:
                await self._opened(host)
            except DaemonError as error:
                self._leave_out(host)
                errors.append(error)
        if len(errors) == len(self._hosts):
            raise errors[0]
        return [str(error) for error in errors]

    async def start(self, spec: Spec) -> "HostedSandbox":
        """Start a sandbox on the host with the largest free share. When all hosts fail, raise the last one's error."""
        tried: list[_Host] = []
        while True:
            host = await self._taken(tried, spec)
            try:
                return await self._start(host, spec)
            except DaemonError:
                tried.append(host)
                if len(tried) == len(self._hosts):
                    raise

    async def _taken(self, tried: Sequence[_Host], spec: Spec) -> _Host:
        """Choose the best host that was not tried, and take a place on it. Wait while all are full, unless `beside`."""
        precedes = spec.first and not tried  # after a failure others could use hosts that it no longer waits for
        async with self._freed:
            self._preceding += precedes
            try:
                while (host := self._best(tried, spec)) is None:
                    await self._freed_or_due(tried)
                host.used += 1
                return host
            finally:
                self._preceding -= precedes
                if precedes:
                    self._freed.notify_all()

    async def _freed_or_due(self, tried: Sequence[_Host]) -> None:
        """Wait until a place becomes free, or a host that is left out is due again."""
        now = time.monotonic()
        due = [host.out_until - now for host in self._hosts if host not in tried and host.out_until > now]
        with suppress(TimeoutError):
            async with asyncio.timeout(min(due, default=None)):
                await self._freed.wait()

    def _best(self, tried: Sequence[_Host], spec: Spec) -> _Host | None:
        """Return the host to start on. None while there is none, or others take precedence."""
        if self._preceding and not (spec.beside or spec.first):
            return None
        left = [host for host in self._hosts if host not in tried]
        due = [host for host in left if host.out_until <= time.monotonic()]
        able = [host for host in due or left if spec.beside or not host.full]
        return min(able, key=lambda host: host.share if due else host.out_until, default=None)

    async def _start(self, host: _Host, spec: Spec) -> "HostedSandbox":
        at = (host.options.address, image_label(spec))
        starting, began = self.metrics.starting.labels(*at), time.monotonic()
        starting.inc()
        try:
            inner = await (await self._opened(host)).start(spec)
        except BaseException as error:  # cancelled as well: the place on the host is free again
            await self._free(host)
            if isinstance(error, SandboxError):
                self.failed(host, at, error)
            raise
        finally:
            starting.dec()
        self.metrics.start_seconds.labels(*at).observe(time.monotonic() - began)
        self.metrics.live.labels(*at).inc()
        host.failed, host.out_until = 0, 0.0
        return HostedSandbox(inner, self, host, at)

    async def _opened(self, host: _Host) -> Sandboxes:
        async with host.opening:
            if host.sandboxes is None:
                host.sandboxes = await self._open(host.options.address)
            return host.sandboxes

    async def _free(self, host: _Host) -> None:
        async with self._freed:
            host.used -= 1
            self._freed.notify_all()

    async def gone(self, host: _Host, at: tuple[str, str], stop: Awaitable[None]) -> None:
        """Stop a sandbox and give its place on the host back."""
        stopping = self.metrics.stopping.labels(*at)
        self.metrics.live.labels(*at).dec()
        stopping.inc()
        try:
            await stop
        except SandboxError as error:
            self.failed(host, at, error)
            raise
        finally:
            stopping.dec()
            await self._free(host)

    def failed(self, host: _Host, at: tuple[str, str], error: SandboxError) -> None:
        """Count a failure. If the host itself failed, avoid it for a while."""
        self.metrics.failures.labels(*at, failure_kind(error)).inc()
        if isinstance(error, DaemonError):
            self._leave_out(host)

    def _leave_out(self, host: _Host) -> None:
        now = time.monotonic()
        if host.out_until <= now:  # several failures at once count as one
            host.out_until = now + min(self._out_seconds * 2**host.failed, MAX_OUT_SECONDS)
            host.failed += 1
            self.metrics.hosts_left_out.labels(host.options.address).inc()

    async def close(self) -> None:
        """Close every host, also when one of them fails."""
        opened = [host.sandboxes for host in self._hosts if host.sandboxes is not None]
        for result in await asyncio.gather(*(one.close() for one in opened), return_exceptions=True):
            if isinstance(result, BaseException) and not isinstance(result, DaemonError):
                raise result


class HostedSandbox:
    """A sandbox on one of the hosts. Reports failures of the host to the fleet."""

    def __init__(self, inner: Sandbox, hosts: Hosts, host: _Host, at: tuple[str, str]):
        self.id, self.work, self.home = inner.id, inner.work, inner.home
        self.model_url, self.bundles, self.own_root = inner.model_url, inner.bundles, inner.own_root
        self.host = at[0]
        self._inner, self._hosts, self._host, self._at = inner, hosts, host, at
        self._stopped = False

    async def _reporting(self, doing: Awaitable[T]) -> T:
        try:
            return await doing
        except DaemonError as error:
            self._hosts.failed(self._host, self._at, error)
            raise

    def account(self, user: User) -> tuple[str, str] | None:
        return self._inner.account(user)

    async def run(
        self,
        command: str,
        limits: Limits,
        env: Mapping[str, str],
        user: User = "agent",
        on_output: OnOutput | None = None,
    ) -> Result:
        return await self._reporting(self._inner.run(command, limits, env, user, on_output))

    async def keep_processes(self) -> None:
        await self._reporting(self._inner.keep_processes())

    async def alone(self) -> bool:
        return await self._reporting(self._inner.alone())

    async def end_processes(self) -> int:
        return await self._reporting(self._inner.end_processes())

    async def allow_network(self) -> None:
        await self._reporting(self._inner.allow_network())

    async def write(self, path: str, content: str | bytes, user: User = "agent") -> None:
        await self._reporting(self._inner.write(path, content, user))

    async def read(self, path: str, limit: int = 1 << 20, user: User = "agent") -> bytes | None:
        return await self._reporting(self._inner.read(path, limit, user))

    async def freeze(self) -> None:
        await self._reporting(self._inner.freeze())

    async def thaw(self) -> None:
        await self._reporting(self._inner.thaw())

    async def restart(self) -> None:
        await self._reporting(self._inner.restart())

    async def run_in_service(self, service: str, command: str, limits: Limits) -> Result:
        return await self._reporting(self._inner.run_in_service(service, command, limits))

    async def pack(self, path: str, archive: IO[bytes], limit: int, service: str = "") -> bool:
        return await self._reporting(self._inner.pack(path, archive, limit, service))

    async def changed(self) -> Mapping[str, bool]:
        return await self._reporting(self._inner.changed())

    async def restore(self, paths: Sequence[str]) -> None:
        await self._reporting(self._inner.restore(paths))

    async def put(self, source: Path, path: str, user: User = "agent") -> None:
        await self._reporting(self._inner.put(source, path, user))

    async def get(self, path: str, target: Path, user: User = "agent") -> None:
        await self._reporting(self._inner.get(path, target, user))

    async def stop(self) -> None:
        if self._stopped:
            return await self._inner.stop()
        self._stopped = True
        return await self._hosts.gone(self._host, self._at, self._inner.stop())


def image_label(spec: Spec) -> str:
    """Return the image's name for people: its own, or that of the directory that it is built from."""
    if spec.image is None:
        return ""
    return spec.image.name if spec.image.context is None else spec.image.context.name


def failure_kind(error: SandboxError) -> str:
    """Return the kind of a failure, for its counter."""
    if isinstance(error, ImageError):
        return "image"
    if isinstance(error, DaemonError):
        return "disk" if "out of disk" in str(error) else "daemon"
    return "sandbox"
