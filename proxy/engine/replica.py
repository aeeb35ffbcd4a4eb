"""One replica as the proxy knows it: its circuit, its weights, its slots' load, and what is believed cached there.

All of it is small and lost with the process. What is believed cached is forgotten when the weights change or the
replica is lost, as the cache itself is. Left out: choosing among replicas (routing.py, fleet.py).
"""

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace

from proxy.engine.circuit import Circuit
from proxy.engine.client import EngineClient, ServerDescription
from proxy.engine.routing import Load, Meter, Slot
from proxy.engine.engine_call import Sampling, SamplingRequest

KEEP = 4096
"""Attempts and groups that a slot remembers; the least recently served one is forgotten first."""


@dataclass(frozen=True)
class Origin:
    """Whose call it is, as far as that says what is cached where."""

    attempt: int
    group: int | None
    known: int
    """Tokens at the start of the prompt that an earlier call of the attempt had too."""

    @property
    def key(self) -> str:
        """What the slots are ordered by; the same in every proxy of a pool."""
        return f"attempt {self.attempt}" if self.group is None else f"group {self.group}"


class Held:
    """Which attempts and groups have how many tokens in a slot's cache, as far as we know."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, int], int] = OrderedDict()

    def of(self, origin: Origin, length: int) -> int:
        """Of a prompt of `length` tokens: what the attempt had there before, or what its group begins with."""
        own = min(origin.known, self._tokens.get(("attempt", origin.attempt), 0))
        shared = 0 if origin.group is None else min(length, self._tokens.get(("group", origin.group), 0))
        return max(own, shared)

    def note(self, origin: Origin, length: int) -> None:
        """A path of `length` tokens is in the cache, or will be before a later call is served."""
        self._put(("attempt", origin.attempt), length)
        if origin.group is not None and origin.known == 0:
            self._put(("group", origin.group), length)

    def forget(self) -> None:
        self._tokens.clear()

    def _put(self, key: tuple[str, int], length: int) -> None:
        self._tokens[key] = max(length, self._tokens.get(key, 0))
        self._tokens.move_to_end(key)
        if len(self._tokens) > KEEP:
            self._tokens.popitem(last=False)


@dataclass(eq=False)
class Place:
    """A slot of a replica and what is known of it."""

    replica: "Replica"
    slot: Slot
    held: Held = field(default_factory=Held)
    meter: Meter = Meter()
    in_flight: int = 0
    waiting: int = 0

    def load(self, origin: Origin, length: int, rate: float) -> Load:
        """As a prompt of `length` tokens finds it."""
        return Load(self.slot, self.in_flight, self.waiting, self.held.of(origin, length), rate)

    def addressed(self, request: SamplingRequest) -> SamplingRequest:
        """The request with this rank, and with the cache salt where one is needed."""
        return replace(request, rank=self.slot.rank, salt=self.replica.salt)


class Visit:
    """One call at one place, from when it is sent until it ends in whatever way."""

    def __init__(self, place: Place, origin: Origin, request: SamplingRequest):
        self._place, self._origin, self._streamed = place, origin, request.stream
        self._length = length = request.prompt_length
        self._ahead = place.waiting
        self._waits = length - place.held.of(origin, length)
        self._sent = time.monotonic()
        self._version = place.replica.version
        self._silent = True
        place.in_flight += 1
        place.waiting += self._waits
        place.held.note(origin, length)
        place.replica.circuit.begun()

    def sampled(self, into: Sampling) -> None:
        """Tokens have come; the first ones tell that the replica lives and how fast it prefills."""
        if not self._silent:
            return
        self._silent = False
        self._place.waiting -= self._waits
        self._place.replica.circuit.sampled()
        if self._streamed and into.version == self._version:  # else the time holds more than the wait and the prefill
            prefilled = self._ahead + self._length - into.cached_tokens
            self._place.meter = self._place.meter.measured(prefilled, time.monotonic() - self._sent)

    def served(self, into: Sampling) -> None:
        """The engine has said why it stopped."""
        replica = self._place.replica
        if into.finish == "abort":
            replica.failed("failed")
            return
        replica.circuit.served()
        replica.serves(into.version)
        replica.prompt_tokens += self._length
        replica.cached_tokens += into.cached_tokens
        self._place.held.note(self._origin, self._length + len(into.ids))

    def end(self) -> None:
        """To be called once, however the call ended."""
        self._place.in_flight -= 1
        if self._silent:
            self._place.waiting -= self._waits
            self._place.replica.circuit.left()


class Replica:
    """One engine address."""

    def __init__(self, url: str, silence_seconds: float):
        self.client = EngineClient(url, silence_seconds)
        self.url = self.client.url
        self.circuit = Circuit()
        self.version = ""
        """The weights last seen there; empty before any were."""
        self.stores = False
        """Whether it keeps a cache outside of the engine, which the flush of an update does not reach."""
        self.layered = False
        """Whether cached prefixes may come back to it without the experts that were chosen for them."""
        self.places = [Place(self, Slot(self.url))]
        self.prompt_tokens = self.cached_tokens = self.failures = 0
        self.woken = asyncio.Event()
        """Set when calls found it lost, or with other weights."""

    @property
    def salt(self) -> str:
        """What keeps the stored cache of one version from being read under another; empty where nothing is stored."""
        return self.version if self.stores else ""

    def serves(self, version: str) -> None:
        """These weights were seen there. With new ones nothing of the old cache is left."""
        if version and version != self.version:
            self.version = version
            self._forget()
            self.woken.set()

    def failed(self, kind: str) -> None:
        """A call or a health check failed."""
        self.failures += 1
        self.circuit.failed(kind)
        if self.circuit.state == "open":
            self._forget()
            self.woken.set()

    def described(self, server: ServerDescription) -> None:
        """What it says of itself."""
        self.stores, self.layered, ranks = server.stores, server.layered, server.ranks
        slots = [Slot(self.url, rank) for rank in range(ranks)] if ranks > 1 else [Slot(self.url)]
        if slots != [place.slot for place in self.places]:
            self.places = [Place(self, slot) for slot in slots]

    def status(self) -> dict[str, object]:
        """For /health."""
        return {
            "url": self.url,
            "state": self.circuit.state,
            "version": self.version or None,
            "ranks": len(self.places),
            "in_flight": sum(place.in_flight for place in self.places),
            "failures": self.failures,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
        }

    def _forget(self) -> None:
        for place in self.places:
            place.held.forget()
