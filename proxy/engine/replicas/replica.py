"""What the proxy knows about one replica: its circuit, its weights, its slots' load, and what is probably cached there.

All of it is small and lost with the process. The record of cached prefixes is cleared when the weights change or the
replica is lost, as the cache itself is. Left out: choosing among replicas (routing.py, fleet.py).
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from proxy.engine.client import RESERVED_TOKENS, EngineClient, ServerDescription
from proxy.engine.engine_call import Sampling, SamplingRequest
from proxy.engine.replicas.circuit import Circuit
from proxy.engine.replicas.routing import PrefillMeter, Slot, SlotLoad

KEPT_ORIGINS = 4096
"""Attempts and groups remembered for each slot; the least recently served one is forgotten first."""


@dataclass(frozen=True)
class Origin:
    """The attempt and group of a call, which tell where its prompt is cached, and its run."""

    attempt: int
    group: int | None
    known: int
    """Tokens at the start of the prompt that an earlier call of the attempt had as well."""
    run: int | None = None
    """The run whose weights must sample the call. None: any weights may."""

    @property
    def key(self) -> str:
        """The key of the rendezvous hash; the same in every proxy of a pool."""
        return f"attempt {self.attempt}" if self.group is None else f"group {self.group}"


class CachedPrefixes:
    """How many tokens of each attempt and group are probably in a slot's prefix cache."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, int], int] = OrderedDict()

    def of(self, origin: Origin, length: int) -> int:
        """How many of a prompt's `length` tokens are cached: the attempt's own, or those its group begins with."""
        own = min(origin.known, self._tokens.get(("attempt", origin.attempt), 0))
        shared = 0 if origin.group is None else min(length, self._tokens.get(("group", origin.group), 0))
        return max(own, shared)

    def note(self, origin: Origin, length: int) -> None:
        """Note that a path of `length` tokens is in the cache, or will be before a later call is served."""
        self._put(("attempt", origin.attempt), length)
        if origin.group is not None and origin.known == 0:
            self._put(("group", origin.group), length)

    def forget(self) -> None:
        self._tokens.clear()

    def _put(self, key: tuple[str, int], length: int) -> None:
        self._tokens[key] = max(length, self._tokens.get(key, 0))
        self._tokens.move_to_end(key)
        if len(self._tokens) > KEPT_ORIGINS:
            self._tokens.popitem(last=False)


@dataclass(eq=False)
class SlotState:
    """What is known about one slot of a replica."""

    replica: "Replica"
    slot: Slot
    cached: CachedPrefixes = field(default_factory=CachedPrefixes)
    meter: PrefillMeter = PrefillMeter()
    in_flight: int = 0
    waiting: int = 0
    """Tokens that calls have yet to prefill there."""

    def load(self, origin: Origin, length: int, rate: float) -> SlotLoad:
        """The load as a prompt of `length` tokens would find it; `rate`: tokens prefilled per second."""
        return SlotLoad(self.slot, self.in_flight, self.waiting, self.cached.of(origin, length), rate)

    def addressed(self, request: SamplingRequest) -> SamplingRequest:
        """The request with this rank, and with the cache salt where one is needed."""
        return replace(request, rank=self.slot.rank, salt=self.replica.salt)


class SlotCall:
    """One call at one slot, from sending until it ends in whatever way."""

    def __init__(self, state: SlotState, origin: Origin, request: SamplingRequest):
        self._slot, self._origin, self._streamed = state, origin, request.stream
        self._length = length = request.prompt_length
        self._ahead = state.waiting
        self._waits = length - state.cached.of(origin, length)
        self._sent = time.monotonic()
        self._version = state.replica.version
        self._silent = True
        state.in_flight += 1
        state.waiting += self._waits
        state.cached.note(origin, length)
        state.replica.circuit.begun()

    def sampled(self, into: Sampling) -> None:
        """Note that tokens have come. The first ones show that the replica lives and how fast it prefills."""
        if not self._silent:
            return
        self._silent = False
        self._slot.waiting -= self._waits
        self._slot.replica.circuit.sampled()
        if self._streamed and into.version == self._version:  # else the time includes the update of the weights
            prefilled = self._ahead + self._length - into.cached_tokens
            self._slot.meter = self._slot.meter.measured(prefilled, time.monotonic() - self._sent)

    def served(self, into: Sampling) -> None:
        """Note that the call ended with a finish reason."""
        replica = self._slot.replica
        if into.finish == "abort":
            replica.failed("failed")
            return
        replica.circuit.served()
        replica.serves(into.version)
        replica.prompt_tokens += self._length
        replica.cached_tokens += into.cached_tokens
        if into.verifications:
            replica.verifications += into.verifications
            replica.verified_tokens += into.fresh
        self._slot.cached.note(self._origin, self._length + into.fresh)

    def end(self) -> None:
        """Release the slot. Call it exactly once, however the call ended."""
        self._slot.in_flight -= 1
        if self._silent:
            self._slot.waiting -= self._waits
            self._slot.replica.circuit.left()


class Replica:
    """One engine address and what was seen of it."""

    def __init__(self, url: str, silence_seconds: float):
        self.client = EngineClient(url, silence_seconds)
        self.url = self.client.url
        self.circuit = Circuit()
        self.version = ""
        """The weight version last seen there; empty before the first."""
        self.known = False
        """Whether it has said what kind of server it is since it was last lost."""
        self.stores = False
        """Whether it stores cached prefixes outside of the engine, where the flush of a push does not reach them."""
        self.layered = False
        """Whether it has HiCache (SGLang 0.5.23), which brings cached prefixes back without their chosen experts."""
        self.reserved = RESERVED_TOKENS
        """Tokens of the context that it keeps for itself."""
        self.slots = [SlotState(self, Slot(self.url))]
        self.prompt_tokens = self.cached_tokens = self.failures = 0
        self.verifications = self.verified_tokens = 0
        """Checks of drafted tokens, and the tokens that they yielded, of the calls that were served."""
        self.woken = asyncio.Event()
        """Set when a call found it lost or with other weights, so that it is checked at once."""
        self.away = ""
        """Empty, or its name for people while it does not answer or has lost its weights."""
        self.pushed = ""
        """The published version that was last seen there; empty before the first."""
        self.checking: asyncio.Task[None] | None = None
        """A check that a call asked for."""

    @property
    def salt(self) -> str:
        """The cache salt, so that a stored prefix of one version is not read under another; empty without a store."""
        return self.version if self.stores else ""

    def serves(self, version: str) -> None:
        """Note the weight version seen there. New weights empty its cache."""
        if version and version != self.version:
            self.version = version
            self._forget_cache()
            self.woken.set()

    def failed(self, kind: str) -> None:
        """Note that a call or a health check failed."""
        self.failures += 1
        self.circuit.failed(kind)
        if self.circuit.state == "open":
            self.known = False
            self._forget_cache()
            self.woken.set()

    def described(self, server: ServerDescription) -> None:
        """Note what the server says about itself."""
        self.known, self.stores, self.layered = True, server.stores, server.layered
        self.reserved, ranks = server.reserved, server.ranks
        slots = [Slot(self.url, rank) for rank in range(ranks)] if ranks > 1 else [Slot(self.url)]
        if slots != [state.slot for state in self.slots]:
            self.slots = [SlotState(self, slot) for slot in slots]

    async def status(self) -> dict[str, object]:
        """Its entry in /health. Counts are of the calls that it served since the proxy started.

        `queue`: calls that wait in the engine now; `accept_length`: tokens that one check of drafts yields. None where
        the engine does not tell.
        """
        return {
            "url": self.url,
            "state": self.circuit.state,
            "version": self.version or None,
            "ranks": len(self.slots),
            "in_flight": sum(state.in_flight for state in self.slots),
            "queue": await self.client.queue(),
            "failures": self.failures,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "accept_length": self.verified_tokens / self.verifications if self.verifications else None,
        }

    def _forget_cache(self) -> None:
        for state in self.slots:
            state.cached.forget()
