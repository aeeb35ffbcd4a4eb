"""A pool of spare containers, started ahead to hide the time that a start takes. Off by default.

The first sandbox of a spec is started as usual. From then on, `count` spares of the same spec and image are kept ready;
a background task refills them, one start at a time. A spare is handed out once, if it still runs. Spares of an image
that has changed, and of specs that were not requested lately, are removed. They take memory on the host, and carry the
labels of all sandboxes, so `sandboxes gc` removes them too.
"""

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field, replace

import msgspec

from sandboxes.base import Sandbox, SandboxError, Spec
from sandboxes.docker.backend import DockerSandboxes
from sandboxes.docker.container.sandbox import DockerSandbox

SPECS = 16
"""Maximum specs with spares: those requested last. A task has two, its agent's and its verifier's."""


@dataclass(eq=False)
class _Stock:
    """The spare sandboxes of one spec."""

    image: str
    """Id of the image, which changes with its content."""
    spares: list[DockerSandbox] = field(default_factory=list)
    filling: asyncio.Task[None] | None = None


class WarmPool:
    """Starts Docker sandboxes, some of them ahead of the request."""

    kind = "docker"

    def __init__(self, inner: DockerSandboxes, count: int):
        self.promise = inner.promise
        self._inner, self._count = inner, count
        self._stocks: OrderedDict[bytes, _Stock] = OrderedDict()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def spares(self) -> int:
        """Return how many spares are ready."""
        return sum(len(stock.spares) for stock in self._stocks.values())

    @property
    def away(self) -> str:
        return self._inner.away

    @property
    def away_seconds(self) -> float:
        return self._inner.away_seconds

    @property
    def making(self) -> str:
        return self._inner.making

    async def was_away(self, since: float, sandbox: Sandbox | None = None) -> bool:
        return await self._inner.was_away(since, sandbox)

    async def until_there(self) -> None:
        await self._inner.until_there()

    async def start(self, spec: Spec) -> DockerSandbox:
        image = (await self._inner.images.base(spec)).id
        key = msgspec.json.encode(replace(spec, beside=False, first=False), enc_hook=str, order="deterministic")
        stock = self._stocks.get(key)
        if stock is None or stock.image != image:
            if stock is not None:
                self._clear(stock)
            stock = self._stocks[key] = _Stock(image)
        self._stocks.move_to_end(key)
        while len(self._stocks) > SPECS:
            self._clear(self._stocks.popitem(last=False)[1])
        try:
            return await self._spare(stock) or await self._inner.start(spec)
        finally:
            if stock.filling is None or stock.filling.done():
                stock.filling = asyncio.create_task(self._fill(stock, spec))

    async def _spare(self, stock: _Stock) -> DockerSandbox | None:
        while stock.spares:
            spare = stock.spares.pop(0)
            try:
                with self._inner.daemon.translating_errors(f"looking at {spare.container}"):
                    state = (await self._inner.daemon.container(spare.container).show())["State"]
            except SandboxError:
                state = {"Running": False}  # it is gone; if the daemon is too, the next start reports that
            except BaseException:  # cancelled: nobody will stop this spare otherwise
                self._discard(spare)
                raise
            if state["Running"]:
                return spare
            self._discard(spare)
        return None

    async def _fill(self, stock: _Stock, spec: Spec) -> None:
        while len(stock.spares) < self._count and stock in self._stocks.values():
            try:
                sandbox = await self._inner.start(spec)
            except SandboxError:
                return  # the next start meets the same error and reports it
            stock.spares.append(sandbox)
        if stock not in self._stocks.values():
            self._clear(stock)

    def _clear(self, stock: _Stock) -> None:
        spares, stock.spares = stock.spares, []
        for spare in spares:
            self._discard(spare)

    def _discard(self, spare: DockerSandbox) -> None:
        leaving = asyncio.create_task(_stopped(spare))
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def close(self) -> None:
        """Remove the spares, then all other sandboxes."""
        filling = [stock.filling for stock in self._stocks.values() if stock.filling is not None]
        self._stocks.clear()
        for task in filling:
            task.cancel()
        await asyncio.gather(*filling, *self._leaving, return_exceptions=True)
        await self._inner.close()


async def _stopped(spare: DockerSandbox) -> None:
    try:
        await spare.stop()
    except SandboxError:
        return  # `sandboxes gc` removes it, once this process has ended
