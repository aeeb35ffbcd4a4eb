"""Server-sent events: which parts of a pool have changed, so that an open page asks for them again.

An event names what changed and carries no rows. The pool is looked at once for all pages that are open.
"""

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
from aiohttp import web

from proxy.dashboard.access import HEADERS
from proxy.dashboard.reader import Read
from proxy.pool.browse.changes import Marks, marks
from proxy.pool.database import Pool
from proxy.pool.errors import PoolError

LOOK_SECONDS = 2.0
"""Seconds between two looks at the pool while a page is open."""
QUIET_LOOKS = 10
"""Looks without a change after which a sign of life is sent, so that a dead connection is noticed."""
MOST_PAGES = 64
"""Pages that may listen at once."""


@dataclass(eq=False)
class _Page:
    """A page that listens."""

    events: "asyncio.Queue[bytes]"


class LiveRoute:
    """The route of one pool."""

    def __init__(self, pool: Pool, read: Read):
        self._pool = pool
        self._read = read
        self._pages: set[_Page] = set()
        self._looking: asyncio.Task[None] | None = None

    def add(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_get("/api/live", self._live)

    async def stop(self, _: Any = None) -> None:
        """End all streams."""
        for page in self._pages:
            page.events.put_nowait(b"")
        if self._looking is not None:
            self._looking.cancel()

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """Send events that name what has changed in the pool, until the page is closed."""
        if len(self._pages) >= MOST_PAGES:
            raise PoolError(f"{MOST_PAGES} pages listen already; close one")
        headers = HEADERS | {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        response = web.StreamResponse(headers=headers)
        page = _Page(asyncio.Queue(maxsize=16))
        await response.prepare(request)
        self._pages.add(page)
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            await response.write(b": listening\n\n")
            while event := await page.events.get():
                await response.write(event)
        except ConnectionResetError:  # the page is closed
            pass
        finally:
            self._pages.discard(page)
        return response

    async def _look(self) -> None:
        """Look at the pool again and again while a page listens."""
        before: Marks | None = None
        quiet = 0
        while self._pages:
            try:
                now = await self._read(marks, self._pool)
            except PoolError as error:
                self._tell("trouble", {"error": str(error)})
            else:
                changed = [] if before is None else now.since(before)
                quiet = 0 if changed else quiet + 1
                if changed or before is None:
                    self._tell("changed", {"parts": changed, "marks": asdict(now)})
                elif quiet % QUIET_LOOKS == 0:
                    self._send(b": still here\n\n")
                before = now
            await asyncio.sleep(LOOK_SECONDS)

    def _tell(self, kind: str, what: Any) -> None:
        self._send(b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode(what) + b"\n\n")

    def _send(self, event: bytes) -> None:
        for page in self._pages:
            if page.events.full():  # it does not read; it will ask for all when it comes back
                continue
            page.events.put_nowait(event)
