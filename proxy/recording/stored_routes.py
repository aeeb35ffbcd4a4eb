"""The routes by which clients retrieve and delete stored responses. A key opens those of its own attempt only."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

from aiohttp import web

from proxy.call import CallError
from proxy.dialects.base import refuse, refuse_any
from proxy.recording.sessions import Sessions
from proxy.recording.stored_responses import StoredResponses

MOST_ITEMS = 100
T = TypeVar("T")


class StoredRoutes:
    """Serves GET and DELETE of `responses/{id}`, and GET of its `input_items`."""

    def __init__(self, sessions: Sessions, threads: Executor):
        self._sessions = sessions
        self._threads = threads

    async def retrieve(self, request: web.Request) -> web.Response:
        refuse_any({"stream": request.query.get("stream", "false") != "false"}, "is not served; leave it out")
        return web.json_response(await self._of(request, lambda stored, id: stored.response(id)))

    async def delete(self, request: web.Request) -> web.Response:
        await self._of(request, lambda stored, id: stored.delete(id, time.time()) or None)
        return web.json_response({"id": request.match_info["id"], "object": "response", "deleted": True})

    async def input_items(self, request: web.Request) -> web.Response:
        """One page of the items, the last ones first unless `order` is asc."""
        query = request.query
        size, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
        if not size.isdecimal() or len(size) > len(str(MOST_ITEMS)) or not 1 <= int(size) <= MOST_ITEMS:
            refuse("limit", f"is {size!r}; use 1 to {MOST_ITEMS}")
        if order not in ("asc", "desc"):
            refuse("order", f"is {order!r}; use 'asc' or 'desc'")
        items = await self._of(request, lambda stored, id: stored.input_items(id))
        items = items if order == "asc" else items[::-1]
        ids = [item["id"] for item in items]
        if after is not None and after not in ids:
            refuse("after", f"is {after!r}, which is none of the items; use an id of the list")
        start = 0 if after is None else ids.index(after) + 1
        page = items[start : start + int(size)]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        return web.json_response({"object": "list", "data": page, **ends, "has_more": start + len(page) < len(items)})

    async def _of(self, request: web.Request, work: Callable[[StoredResponses, str], T | None]) -> T:
        """What the work gives for the response that the path names; CallError 404 where that is None."""
        id, stored = request.match_info["id"], await self._sessions.stored(request)
        loop = asyncio.get_running_loop()
        result = None if stored is None else await loop.run_in_executor(self._threads, work, stored, id)
        if result is None:
            raise CallError(404, "not_found", f"Response with id '{id}' not found.", "id")
        return result
