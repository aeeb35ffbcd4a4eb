"""Bounds the connections that clients hold: how many there are, and how long one may do nothing.

A connection is nobody's until a request on it has shown a valid key. From then on it counts for the attempt of that
key, or for the administrator. Each of the three has places of its own, so that no attempt can take the file descriptors
that other attempts, the administrator, the engines and the pool need. Left out: fairness between keys that nobody has
issued; on loopback, each of them is an attempt of its own.
"""

import asyncio
import resource
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from proxy.call import CallError
from proxy.http.limits import RequestLimits

ADMINISTRATOR = 0
"""The owner of the administrator's connections. Ids of attempts begin at 1."""
TOO_MANY_CONNECTIONS = "too_many_connections"
"""The code of a refused connection. It is closed after the answer."""
MAX_DESCRIPTORS = 1 << 16
RESERVED_DESCRIPTORS = 128
"""File descriptors for everything but clients and engines: the pool's files, listeners, the log."""
SWEEP_SECONDS = 5.0
"""How often the connections are looked at."""


class ClientConnection(Protocol):
    """A connection of a client, as the server has it."""

    @property
    def busy(self) -> bool:
        """Whether a request is being answered."""

    @property
    def requests(self) -> int:
        """How many requests have come."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes that were written and that the kernel has not taken yet."""

    def cut_off(self) -> None:
        """Close the connection at once, whatever is unsent."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """How many connections of each kind there may be."""

    attempts: int
    """Connections of all attempts together. As many more may lead to engines."""
    silent: int
    """Connections that have not shown a valid key."""
    administrator: int

    @classmethod
    def within(cls, descriptors: int, limits: RequestLimits) -> "Places":
        """Divide file descriptors: some are kept back, and of the rest each call needs one here and one to an
        engine."""
        silent, administrator = min(limits.silent_connections, descriptors // 8), min(32, descriptors // 16)
        rest = descriptors - silent - administrator - min(RESERVED_DESCRIPTORS, descriptors // 8)
        return cls(attempts=rest // 2, silent=silent, administrator=administrator)


@dataclass
class _Watched:
    """What was seen of a connection, and when."""

    requests: int
    asked_at: float
    """When the connection was opened or its last request was seen."""
    unsent: int = 0
    taken_at: float = 0
    """Since when the number of unsent bytes has not changed."""


class ClientConnections:
    """All connections of a proxy's clients. It has no lock: only one event loop may use it."""

    def __init__(self, limits: RequestLimits, places: Places):
        self._limits = limits
        self._places = places
        self._per_attempt = min(limits.attempt_connections, max(1, places.attempts // 4))
        self._watched: dict[ClientConnection, _Watched] = {}
        self._owner: dict[ClientConnection, int] = {}
        self._of: dict[int, OrderedDict[ClientConnection, None]] = {}
        """Connections per owner, the one that was used last at the end."""
        self._nobodys: OrderedDict[ClientConnection, None] = OrderedDict()
        self.cut: Counter[str] = Counter()
        """Connections that this proxy closed, by reason."""

    def opened(self, connection: ClientConnection) -> None:
        """Take note of a new connection. The oldest silent one makes room for it."""
        self._watched[connection] = _Watched(0, asyncio.get_running_loop().time())
        self._nobodys[connection] = None
        if len(self._nobodys) > self._places.silent:
            self._cut(next(iter(self._nobodys)), "silent")

    def closed(self, connection: ClientConnection) -> None:
        """Forget a connection that has ended."""
        self._watched.pop(connection, None)
        self._leave(connection)

    def claim(self, request: web.Request, owner: int) -> None:
        """Count a request's connection for an attempt, or for the administrator; CallError when it has too many."""
        connection = request.protocol
        before = self._owner.get(connection)  # type: ignore[call-overload]
        if before == owner:
            self._of[owner].move_to_end(connection)  # type: ignore[arg-type]
        elif connection in self._watched:
            self._give(connection, owner)  # type: ignore[arg-type]

    async def keep_watch(self) -> None:
        """Close connections that do nothing for too long, until cancelled."""
        limits = self._limits
        pause = min(SWEEP_SECONDS, limits.header_seconds / 4, limits.unread_seconds / 4)
        while True:
            await asyncio.sleep(pause)
            now = asyncio.get_running_loop().time()
            for connection, watched in list(self._watched.items()):
                if reason := self._overdue(connection, watched, now):
                    self._cut(connection, reason)

    def _overdue(self, connection: ClientConnection, watched: _Watched, now: float) -> str | None:
        """Say why a connection must end now."""
        unsent = connection.unsent_bytes
        if unsent != watched.unsent:
            watched.unsent, watched.taken_at = unsent, now
        elif unsent and now - watched.taken_at >= self._limits.unread_seconds:
            return "unread"
        if connection.busy or connection.requests != watched.requests:
            watched.requests, watched.asked_at = connection.requests, now
        elif connection in self._nobodys and now - watched.asked_at >= self._limits.header_seconds:
            return "silent"
        return None

    def _give(self, connection: ClientConnection, owner: int) -> None:
        own = self._of.get(owner, OrderedDict())
        if len(own) >= (self._places.administrator if owner == ADMINISTRATOR else self._per_attempt):
            self._close_idle([own], 429, f"this key has {len(own)} connections with calls at work")
        attempts = len(self._owner) - len(self._of.get(ADMINISTRATOR, ()))
        if owner != ADMINISTRATOR and attempts >= self._places.attempts:
            groups = [group for other, group in self._of.items() if other != ADMINISTRATOR]
            largest_first = sorted(groups, key=len, reverse=True)
            self._close_idle(largest_first, 503, f"the proxy serves {attempts} connections, and has no room for more")
        self._leave(connection)
        self._of.setdefault(owner, OrderedDict())[connection] = None
        self._owner[connection] = owner

    def _close_idle(self, groups: Iterable[Iterable[ClientConnection]], status: int, full: str) -> None:
        """Close a connection that waits for its next request, to make room; CallError when there is none."""
        idle = next((connection for group in groups for connection in group if not connection.busy), None)
        if idle is None:
            raise CallError(status, TOO_MANY_CONNECTIONS, f"{full}; try again when one of them has its answer")
        self._cut(idle, "idle")

    def _cut(self, connection: ClientConnection, reason: str) -> None:
        self.cut[reason] += 1
        self.closed(connection)
        connection.cut_off()

    def _leave(self, connection: ClientConnection) -> None:
        self._nobodys.pop(connection, None)
        owner = self._owner.pop(connection, None)
        if owner is not None:
            self._of[owner].pop(connection)
            if not self._of[owner]:
                del self._of[owner]


def open_file_limit() -> int:
    """How many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DESCRIPTORS if soft == resource.RLIM_INFINITY else min(soft, MAX_DESCRIPTORS)


def raise_open_file_limit() -> None:
    """Let this process open as many files as it is allowed to: shells often start programs with 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
