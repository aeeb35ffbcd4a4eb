"""The engine's replicas as the handler uses them: one choice per call, and another one where a replica fails.

Every replica has a circuit (circuit.py). A replica that is lost is asked for its health after growing pauses; one that
comes back with other weights than those that serve gets calls only after it was brought up to date. So does one that a
push has left behind: as soon as any replica serves the newest published version, those that serve another get no calls.
Several proxies before one fleet agree by the hash; they do not see each other's load. Left out: starting replicas,
pushing weights.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

from proxy.engine.circuit import ELSEWHERE, REPLICA
from proxy.engine.moe_config import layered_cache
from proxy.engine.replica import KEEP, Origin, Place, Replica, Visit
from proxy.engine.routing import choose, rates
from proxy.engine.engine_call import EngineError, Sampling, SamplingRequest
from proxy.pool.errors import PoolReadError

TRIES = 3
"""Replicas that one call is sampled on at most, one after the other."""
CHECK_SECONDS = 5.0
"""How often a replica that serves is asked how it is, and which weights it has."""
BEHIND_SECONDS = 0.5
"""The same for one that does not have the newest version, for a push is just bringing it there."""


class Fleet:
    """All replicas. Make it inside the running event loop."""

    def __init__(self, urls: Sequence[str], silence_seconds: float = 600, published: Callable[[], str] = lambda: ""):
        """`published` looks up the newest published version, in a thread; it says "" where none is."""
        self._published, self._newest = published, ""
        self.replicas = [Replica(url, silence_seconds) for url in urls]
        self._failed_for: OrderedDict[int, str] = OrderedDict()  # attempt -> the replica that failed its last call
        self._watching = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for replica in self.replicas:
            await replica.client.close()

    async def healthy(self) -> bool:
        """Whether any replica answers its health check now."""
        return any(await asyncio.gather(*(replica.client.healthy() for replica in self.replicas)))

    def route(self, origin: Origin) -> "Route":
        return Route(self, origin)

    def pick(self, origin: Origin, length: int, tried: set[str]) -> Place:
        """The place for a prompt of `length` tokens on a replica that is not in `tried`."""
        places = [place for replica in self._candidates(origin, tried) for place in replica.places]
        if len(places) == 1:
            return places[0]
        measured = rates([place.meter for place in places])
        loads = [place.load(origin, length, rate) for place, rate in zip(places, measured, strict=True)]
        slot = choose(origin.key, length, loads)
        return next(place for place in places if place.slot == slot)

    def others(self, tried: set[str]) -> list[Replica]:
        """Replicas that take calls and are not in `tried`."""
        admitted = [replica for replica in self.replicas if replica.circuit.admits()]
        current = [replica for replica in admitted if replica.version == self._newest != ""]
        return [replica for replica in current or admitted if replica.url not in tried]

    def failed_for(self, attempt: int, url: str | None) -> None:
        """Note the replica that failed the attempt's last call, so that a retry goes elsewhere; None: it was served."""
        self._failed_for.pop(attempt, None)
        if url is not None:
            self._failed_for[attempt] = url
            if len(self._failed_for) > KEEP:
                self._failed_for.popitem(last=False)

    def _candidates(self, origin: Origin, tried: set[str]) -> list[Replica]:
        failed = self._failed_for.get(origin.attempt)
        found = self.others(tried | {failed}) if failed else []
        if not found:
            found = self.others(tried)  # when all circuits are open, the call goes out all the same: it can but fail
        return found or [replica for replica in self.replicas if replica.url not in tried]

    async def _watch(self, replica: Replica) -> None:
        """Ask a replica how it is, for ever: regularly while it serves, after growing pauses while it does not."""
        while True:
            if replica.circuit.state == "open":
                await asyncio.sleep(replica.circuit.pause())
            await self._check(replica)
            if replica.circuit.state != "open":
                replica.woken.clear()
                behind = self._newest not in ("", replica.version)
                with suppress(TimeoutError):
                    await asyncio.wait_for(replica.woken.wait(), BEHIND_SECONDS if behind else CHECK_SECONDS)

    async def _check(self, replica: Replica) -> None:
        try:
            version = await replica.client.version()
        except EngineError as error:
            replica.failed(error.kind)
            return
        if replica.circuit.state == "open" or not replica.version:
            replica.described(await replica.client.description())
        replica.serves(version)
        if version != self._newest:
            await self._look_up_newest()
        serving = {other.version for other in self.others({replica.url})}
        if not serving or version in serving or version == self._newest:
            replica.circuit.answered()

    async def _look_up_newest(self) -> None:
        try:
            newest = await asyncio.to_thread(self._published)
        except PoolReadError:  # until it answers again, the version that was the newest is
            return
        if newest != self._newest:
            self._newest = newest
            for replica in self.replicas:
                replica.woken.set()


class Route:
    """One call's way through the replicas."""

    def __init__(self, fleet: Fleet, origin: Origin):
        self._fleet = fleet
        self._origin = origin
        self._tried: set[str] = set()

    async def sample(self, request: SamplingRequest, into: Sampling) -> AsyncGenerator[list[int], None]:
        """As EngineClient.sample, at the place that is best for this call and was not tried before."""
        place = self._fleet.pick(self._origin, request.prompt_length, self._tried)
        self._tried.add(place.replica.url)
        if into.experts is not None and place.replica.layered:
            raise EngineError("no_experts", layered_cache(f"the engine at {place.replica.url}"))
        visit = Visit(place, self._origin, request)
        try:
            async with aclosing(place.replica.client.sample(place.addressed(request), into)) as events:
                async for ids in events:
                    visit.sampled(into)
                    yield ids
            visit.served(into)
            self._fleet.failed_for(self._origin.attempt, None)
        except EngineError as error:
            if error.kind in REPLICA:
                place.replica.failed(error.kind)
                self._fleet.failed_for(self._origin.attempt, place.replica.url)
            raise
        finally:
            visit.end()

    def goes_on(self, error: EngineError) -> bool:
        """Whether the call, of which nothing has reached the client, is to be sampled anew elsewhere."""
        return error.kind in ELSEWHERE and len(self._tried) < TRIES and bool(self._fleet.others(self._tried))
