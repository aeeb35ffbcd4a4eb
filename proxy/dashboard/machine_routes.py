"""JSON about machines: what the pool knows of its processes, and what proxies say of their engines' replicas."""

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
from aiohttp import web

from proxy.dashboard.answers import answer
from proxy.dashboard.reader import Read
from proxy.pool.browse.machines import machines
from proxy.pool.database import Pool

ASKED_SECONDS = 3.0
"""Maximum seconds that a proxy has to answer."""


class MachineRoutes:
    """The routes of one pool. `proxies`: addresses of proxies that are asked for their replicas."""

    def __init__(self, pool: Pool, read: Read, proxies: Sequence[str], admin_key: str | None):
        self._pool = pool
        self._read = read
        self._proxies = proxies
        self._headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}

    def add(self, router: web.UrlDispatcher) -> None:
        """Add the route."""
        router.add_get("/api/machines", self._machines)

    async def _machines(self, _: web.Request) -> web.Response:
        """Answer with the pool's processes, and with the replicas that proxies tell of."""
        known, asked = await asyncio.gather(
            self._read(machines, self._pool), asyncio.gather(*(self._health(url) for url in self._proxies))
        )
        return answer({"machines": known, "proxies": asked})

    async def _health(self, url: str) -> dict[str, Any]:
        """Ask a proxy how it and its replicas are."""
        limit = aiohttp.ClientTimeout(total=ASKED_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=limit) as session,
                session.get(f"{url.rstrip('/')}/health", headers=self._headers, allow_redirects=False) as response,
            ):
                health = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return {"url": url, "trouble": f"it does not answer ({type(error).__name__})", "replicas": []}
        if not isinstance(health, dict) or "replicas" not in health:
            return {"url": url, "trouble": "it tells an administrator only; name --admin-key-file", "replicas": []}
        return {"url": url, "trouble": "", "model": health.get("model"), "replicas": health["replicas"]}
