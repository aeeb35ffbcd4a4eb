"""All replicas of the engine: chooses one for each call, and another one when that fails.

Every replica has a circuit (circuit.py). The health of a lost replica is checked after growing pauses; if it returns
with other weights than the serving replicas have, it gets calls only after it was updated. The same holds for one that
a push has left behind: as soon as any replica serves the newest published version, those with another get no calls.
Several proxies of one fleet agree by the hash; they do not see each other's load. Left out: starting replicas, pushing
weights.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress

from proxy.engine.engine_call import EngineError, Sampling, SamplingRequest
from proxy.engine.moe_config import layered_cache
from proxy.engine.replicas.circuit import ELSEWHERE, REPLICA
from proxy.engine.replicas.replica import KEPT_ORIGINS, Origin, Replica, SlotCall, SlotState
from proxy.engine.replicas.routing import choose, rates
from proxy.pool.errors import PoolReadError

TRIES = 3
"""The most replicas that one call is tried on, one after the other."""
CHECK_SECONDS = 5.0
"""Seconds between the checks of a serving replica's health and weights."""
BEHIND_SECONDS = 0.5
"""The same for a replica without the newest version: a push is probably updating it."""


class Fleet:
    """All replicas, each watched by a task. Create it inside the running event loop."""

    def __init__(self, urls: Sequence[str], silence_seconds: float = 600, published: Callable[[], str] = lambda: ""):
        """`published` returns the newest published version, "" where there is none; it is called in a thread."""
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

    def pick(self, origin: Origin, length: int, tried: set[str]) -> SlotState:
        """The slot for a prompt of `length` tokens, on a replica that is not in `tried`."""
        slots = [state for replica in self._candidates(origin, tried) for state in replica.slots]
        if len(slots) == 1:
            return slots[0]
        measured = rates([state.meter for state in slots])
        loads = [state.load(origin, length, rate) for state, rate in zip(slots, measured, strict=True)]
        slot = choose(origin.key, length, loads)
        return next(state for state in slots if state.slot == slot)

    def others(self, tried: set[str]) -> list[Replica]:
        """Replicas that may get calls and are not in `tried`; those with the newest weights where there are any."""
        admitted = [replica for replica in self.replicas if replica.circuit.admits()]
        current = [replica for replica in admitted if replica.version == self._newest != ""]
        return [replica for replica in current or admitted if replica.url not in tried]

    def failed_for(self, attempt: int, url: str | None) -> None:
        """Note which replica failed the attempt's last call, so that a retry goes elsewhere; None: it was served."""
        self._failed_for.pop(attempt, None)
        if url is not None:
            self._failed_for[attempt] = url
            if len(self._failed_for) > KEPT_ORIGINS:
                self._failed_for.popitem(last=False)

    def _candidates(self, origin: Origin, tried: set[str]) -> list[Replica]:
        failed = self._failed_for.get(origin.attempt)
        candidates = self.others(tried | {failed}) if failed else []
        # When all circuits are open, the call is sent all the same: failing is the worst that can happen.
        return candidates or self.others(tried) or [replica for replica in self.replicas if replica.url not in tried]

    async def _watch(self, replica: Replica) -> None:
        """Check a replica until cancelled: regularly while it serves, after growing pauses while it does not."""
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
        except PoolReadError:  # keep the last known version until the pool answers again
            return
        if newest != self._newest:
            self._newest = newest
            for replica in self.replicas:
                replica.woken.set()


class Route:
    """The way of one call through the replicas."""

    def __init__(self, fleet: Fleet, origin: Origin):
        self._fleet = fleet
        self._origin = origin
        self._tried: set[str] = set()
        self._state: SlotState | None = None

    async def sample(self, request: SamplingRequest, into: Sampling) -> AsyncGenerator[list[int], None]:
        """Sample like EngineClient.sample, at the best slot whose replica was not tried for this call.

        The rest of an answer is sampled where its beginning was, whose prefix is cached there.
        """
        if self._state is None or not into.logprobs:
            self._state = self._fleet.pick(self._origin, request.prompt_length, self._tried)
        state = self._state
        self._tried.add(state.replica.url)
        if into.experts is not None and state.replica.layered:
            raise EngineError("no_experts", layered_cache(f"the engine at {state.replica.url}"))
        call = SlotCall(state, self._origin, request)
        try:
            async with aclosing(state.replica.client.sample(state.addressed(request), into)) as events:
                async for ids in events:
                    call.sampled(into)
                    yield ids
            call.served(into)
            self._fleet.failed_for(self._origin.attempt, None)
        except EngineError as error:
            if error.kind in REPLICA:
                state.replica.failed(error.kind)
                self._fleet.failed_for(self._origin.attempt, state.replica.url)
            raise
        finally:
            call.end()

    def goes_on(self, error: EngineError) -> bool:
        """Whether another replica may sample the call again; only for calls of which nothing has reached the client."""
        return error.kind in ELSEWHERE and len(self._tried) < TRIES and bool(self._fleet.others(self._tried))
