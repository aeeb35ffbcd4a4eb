"""The choice of a replica, by simulation: prefixes are found again, loads stay even, a lost replica moves its share.

The simulated engines prefill one prompt after the other at a fixed rate and decode side by side; their caches forget
what was used least recently. Not simulated: paging, batches, retraction.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random

import pytest

from proxy.engine.replicas.replica import CachedPrefixes, Origin
from proxy.engine.replicas.routing import (
    MEASURABLE,
    PREFILL_RATE,
    STAYING,
    PrefillMeter,
    Slot,
    SlotLoad,
    bound,
    choose,
    rates,
)

SLOTS = [Slot(f"http://10.0.0.{number}:30000") for number in range(8)]
KEYS = [f"group {number}" for number in range(4000)]


def homes(slots: Sequence[Slot]) -> dict[str, Slot]:
    """Where each key goes when nothing is loaded or cached."""
    return {key: choose(key, 1000, [SlotLoad(slot) for slot in slots]) for key in KEYS}


def test_a_lost_replica_moves_its_own_share_and_a_new_one_takes_only_its_own() -> None:
    before, after = homes(SLOTS), homes(SLOTS[1:])
    moved = [key for key in KEYS if before[key] != after[key]]
    assert {before[key] for key in moved} == {SLOTS[0]}  # read backwards: the replica that joins takes only its share
    assert len(moved) == pytest.approx(len(KEYS) / len(SLOTS), rel=0.15)
    assert max(Counter(after.values()).values()) < 1.15 * len(KEYS) / (len(SLOTS) - 1)


def test_ranks_of_one_replica_are_slots_of_their_own() -> None:
    counts = Counter(homes([Slot("http://one", rank) for rank in range(4)]).values())
    assert len(counts) == 4 and min(counts.values()) > 0.85 * len(KEYS) / 4


def test_the_order_of_the_replicas_in_the_configuration_does_not_matter() -> None:
    assert homes(SLOTS) == homes(SLOTS[::-1])


def test_a_full_slot_is_passed_over_and_some_slot_is_never_full() -> None:
    home = homes(SLOTS)["group 1"]
    full = [SlotLoad(slot, in_flight=100 if slot == home else 0, cached=900 if slot == home else 0) for slot in SLOTS]
    assert choose("group 1", 1000, full) != home
    even = [SlotLoad(slot, in_flight=100) for slot in SLOTS]
    assert choose("group 1", 1000, even) == home and bound(800, 8) > 100


def test_another_slot_is_taken_when_the_queue_costs_more_than_the_prefill() -> None:
    home, other = Slot("http://home"), Slot("http://other")

    def chosen(waiting: int) -> Slot:
        return choose("any", 1000, [SlotLoad(home, waiting=waiting, cached=990), SlotLoad(other)])

    assert chosen(waiting=700) == home and chosen(waiting=5000) == other
    slow = [SlotLoad(home, cached=500, rate=100), SlotLoad(other, rate=10_000)]
    assert choose("any", 1000, slow) == other


def test_rates_are_measured_and_stated_before() -> None:
    fast, unknown = PrefillMeter().measured(4000, 0.5), PrefillMeter()
    assert rates([unknown, unknown]) == [PREFILL_RATE] * 2
    assert rates([fast, unknown]) == [8000, 8000]
    assert fast.measured(MEASURABLE - 1, 100) == fast  # a short prefill measures the round trip
    slowed = fast
    for _ in range(100):
        slowed = slowed.measured(1000, 1)
    assert slowed.rate == pytest.approx(1000, rel=0.05)


GROUP, PREFIX, TURNS, GROWTH = 8, 4000, 15, 600
ROLLOUTS_AT_ONCE, GROUPS = 128, 48


@dataclass
class Engine:
    """A simulated replica. `cache` maps a group's prefix and an attempt's path to tokens."""

    slot: Slot
    rate: float = 20_000.0
    capacity: int = 1_500_000
    cache: OrderedDict[tuple[str, int], int] = field(default_factory=OrderedDict)
    cached: CachedPrefixes = field(default_factory=CachedPrefixes)
    meter: PrefillMeter = PrefillMeter()
    in_flight: int = 0
    waiting: int = 0
    free_at: float = 0.0

    def prefill(self, origin: Origin, length: int) -> int:
        """Take a prompt in and return how much of it was cached."""
        group, own = ("group", origin.group or 0), ("attempt", origin.attempt)
        cached = max(self.cache.get(group, 0), self.cache.get(own, 0))
        for key, tokens in ((group, PREFIX), (own, length + GROWTH // 2)):
            self.cache[key] = tokens
            self.cache.move_to_end(key)
        while sum(self.cache.values()) > self.capacity:
            self.cache.popitem(last=False)
        return min(cached, length)


Choice = Callable[[Origin, int, list[Engine]], Engine]


class Simulation:
    """Rollouts of many groups on some engines; `dies` removes the first engine at that time."""

    def __init__(self, engines: list[Engine], choice: Choice, dies: float = float("inf")):
        self.engines, self.choice, self.dies = engines, choice, dies
        self.random = Random(0)
        self.prompt = self.cached = self.finished = 0
        self.peaks: list[float] = []
        self.moved: dict[int, list[tuple[Slot, Slot]]] = {}
        self._at: dict[int, Slot] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = self._started = 0

    def run(self) -> "Simulation":
        if self.dies < float("inf"):
            self._later(self.dies, lambda now: self.engines.remove(self.engines[0]))
        for _ in range(ROLLOUTS_AT_ONCE // GROUP):
            self._open_group(0.0)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            event(now)
        return self

    @property
    def hit_rate(self) -> float:
        return self.cached / self.prompt

    def _later(self, when: float, event: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, event))

    def _open_group(self, now: float) -> None:
        if self._started < GROUPS:
            group = self._started = self._started + 1
            for member in range(GROUP):
                origin = Origin(group * GROUP + member, group, 0)
                self._later(now + self.random.expovariate(2), partial(self._call, origin, 0))

    def _call(self, origin: Origin, turn: int, now: float) -> None:
        length = PREFIX + turn * GROWTH
        origin = Origin(origin.attempt, origin.group, length - GROWTH // 2 if turn else 0)
        engine = self.choice(origin, length, self.engines)
        before = self._at.get(origin.attempt, engine.slot)
        if before != engine.slot:
            self.moved.setdefault(origin.attempt, []).append((before, engine.slot))
        self._at[origin.attempt] = engine.slot
        expected, ahead = length - engine.cached.of(origin, length), engine.waiting
        engine.in_flight, engine.waiting = engine.in_flight + 1, engine.waiting + expected
        engine.cached.note(origin, length + GROWTH // 2)
        total = sum(each.in_flight for each in self.engines) - 1
        self.peaks.append(engine.in_flight / bound(total, len(self.engines), STAYING))
        cached = engine.prefill(origin, length)
        self.prompt, self.cached = self.prompt + length, self.cached + cached
        first = engine.free_at = max(now, engine.free_at) + (length - cached) / engine.rate
        end = first + self.random.uniform(2, 6)

        def sampled(at: float) -> None:
            engine.waiting -= expected
            engine.meter = engine.meter.measured(ahead + length - cached, at - now)

        def ended(at: float) -> None:
            engine.in_flight -= 1
            if turn + 1 < TURNS:
                self._later(at + self.random.expovariate(1 / 3), partial(self._call, origin, turn + 1))
            else:
                self.finished += 1
                if self.finished % GROUP == 0:
                    self._open_group(at)

        self._later(first, sampled)
        self._later(end, ended)


def routed(origin: Origin, length: int, engines: list[Engine]) -> Engine:
    known = rates([engine.meter for engine in engines])
    loads = [
        SlotLoad(engine.slot, engine.in_flight, engine.waiting, engine.cached.of(origin, length), rate)
        for engine, rate in zip(engines, known, strict=True)
    ]
    slot = choose(origin.key, length, loads)
    return next(engine for engine in engines if engine.slot == slot)


def least_loaded(origin: Origin, length: int, engines: list[Engine]) -> Engine:
    return min(engines, key=lambda engine: engine.in_flight)


def ideal() -> float:
    """The hit rate when each group's prefix is prefilled once and each turn's growth once."""
    prompts = sum(PREFIX + turn * GROWTH for turn in range(TURNS)) * GROUP
    return 1 - (PREFIX + GROUP * (TURNS - 1) * GROWTH / 2) / prompts


def fleet(count: int) -> list[Engine]:
    return [Engine(slot) for slot in SLOTS[:count]]


def test_prefixes_are_found_again_and_the_load_stays_within_the_bound() -> None:
    ours, blind = Simulation(fleet(4), routed).run(), Simulation(fleet(4), least_loaded).run()
    assert ours.finished == blind.finished == GROUPS * GROUP
    assert ours.hit_rate > 0.98 * ideal() > 1.1 * blind.hit_rate
    assert 0.5 < max(ours.peaks) <= 1


def test_rollouts_stay_where_they_are_while_all_goes_well() -> None:
    steady = Simulation(fleet(4), routed).run()
    assert len(steady.moved) < 0.15 * GROUPS * GROUP


def test_when_a_replica_dies_its_rollouts_go_on_elsewhere_and_the_others_stay() -> None:
    shaken = Simulation(fleet(4), routed, dies=60.0).run()
    dead = SLOTS[0]
    evicted = [attempt for attempt, moves in shaken.moved.items() if dead in [before for before, _ in moves]]
    assert shaken.finished == GROUPS * GROUP and len(evicted) > GROUP
    assert len(shaken.moved) - len(evicted) < 0.2 * GROUPS * GROUP
    assert shaken.hit_rate > 0.96 * ideal()
