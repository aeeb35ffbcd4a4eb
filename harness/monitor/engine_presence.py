"""Whether any engine is up, as the proxy sees it, and how long the calls of an attempt have waited for one.

An outage of all engines costs no attempt: its calls wait at the proxy, and its clocks stand still meanwhile. Left out:
a proxy that does not answer, whose calls cannot wait.
"""

import time
from contextlib import nullcontext
from typing import Any

import aiohttp
import msgspec

from sandboxes.clocks import Presence

ANSWER_SECONDS = 10
"""How long the proxy may take to answer. It asks nobody for this."""


def _open_client() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS), raise_for_status=True)


class _Outage(msgspec.Struct):
    away: str
    seconds: float


class EnginePresence(Presence):
    """Watches the engines of a proxy."""

    def __init__(self, url: str, admin_key: str | None = None, patience: float = 1800, run_id: int | None = None):
        """`run_id`: the run whose weights an engine must have to count as up."""
        super().__init__("every engine")
        self._proxy = url, admin_key
        self._patience, self._run_id = patience, run_id
        self._client: aiohttp.ClientSession | None = None
        """Kept open while the engines are watched, as each attempt asks once."""

    def __reduce__(self) -> tuple[Any, ...]:
        """The node of a cluster asks the proxy for itself."""
        return type(self), (*self._proxy, self._patience, self._run_id)

    def of_run(self, run_id: int) -> "EnginePresence":
        """Watch the engines for another run."""
        return EnginePresence(*self._proxy, self._patience, run_id)

    @property
    def patience(self) -> float:
        return self._patience

    async def ask(self) -> bool:
        outage = await self._asked()
        self.name = outage.away or self.name
        return not outage.away

    async def stood_still(self, attempt_id: int, since: float) -> float:
        """Seconds after `since` (unix time) in which calls of the attempt waited while no engine was up."""
        return (await self._asked(attempt=attempt_id, within=max(0.0, time.time() - since))).seconds

    def watch(self) -> None:
        super().watch()
        self._client = self._client or _open_client()

    async def close(self) -> None:
        await super().close()
        client, self._client = self._client, None  # first, so that nobody asks with one that closes
        if client is not None:
            await client.close()

    async def _asked(self, **query: float) -> _Outage:
        url, admin_key = self._proxy
        query |= {} if self._run_id is None else {"run": self._run_id}
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        try:
            async with (
                nullcontext(self._client) if self._client else _open_client() as client,
                client.get(f"{url}/outage", params=query, headers=headers) as answer,
            ):
                return msgspec.json.decode(await answer.read(), type=_Outage)
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError):
            return _Outage("", 0.0)
