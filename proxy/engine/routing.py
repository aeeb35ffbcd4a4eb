"""Which replica, and which data-parallel rank of it, samples a call: pure functions of a few numbers per slot.

A slot is one prefix cache: a replica, or one rank of it. The key of a call (its group, as the prompts of a group share
a prefix; else its attempt) puts the slots in an order of its own by rendezvous hashing, so that a slot that comes or
goes moves its own share of the keys and no other. Slots with too many calls in flight are passed over (bounded load).
Of the rest the first is taken, unless another is clearly cheaper: fewer tokens to prefill before the first sampled one,
counting those that wait there, at the rate measured there.
Left out: evictions that the engine does not tell, the time to decode (the bound stands for it), fetching from a shared
L3 cache, load that other proxies bring.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import NamedTuple

EXCESS = 0.25
"""How far a slot's calls in flight may exceed the mean of all slots when it takes a prompt of which it holds little."""
STAYING = 0.5
"""The same where it holds at least half of the prompt, so that rollouts do not wander with every ripple of the load."""
SPARE = 8
"""Calls that a slot takes whatever the others have: scattering one group over idle slots gains nothing."""
OWN = 2
"""What a token of its own prompt counts beside one that waits: prefilling it delays the calls behind as well."""
SAVING = 0.8
"""Another slot than the first is worth it below this share of the first one's cost; rates and beliefs are rough."""
PREFILL_RATE = 10_000.0
"""Tokens per second that a slot prefills, until any has been measured. It cancels out where no slot has been."""
MEASURABLE = 512
"""Prefilled tokens from which the time to the first token says something about the rate."""
DECAY = 0.95
"""What a measurement still counts after the next one."""


class Slot(NamedTuple):
    """One prefix cache. `rank` is None where the replica has a single one."""

    url: str
    rank: int | None = None


class Load(NamedTuple):
    """A slot as one call finds it."""

    slot: Slot
    in_flight: int = 0
    """Calls sent there that have not ended."""
    waiting: int = 0
    """Tokens to prefill there before this call's."""
    cached: int = 0
    """Tokens of this call's prompt that are believed to be in the cache."""
    rate: float = PREFILL_RATE
    """Tokens per second that the slot prefills."""


@dataclass(frozen=True)
class Meter:
    """How fast a slot prefills; sums over past calls, each counting DECAY times as much as the one after it."""

    tokens: float = 0.0
    seconds: float = 0.0

    def measured(self, tokens: int, seconds: float) -> "Meter":
        """With one more call, whose first token came `seconds` after it was sent and `tokens` were prefilled."""
        if tokens < MEASURABLE or seconds <= 0:
            return self
        return Meter(self.tokens * DECAY + tokens, self.seconds * DECAY + seconds)

    @property
    def rate(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


def rates(meters: Sequence[Meter]) -> list[float]:
    """Tokens per second of each slot; the mean of the measured ones where nothing is known, PREFILL_RATE where none."""
    known = [rate for meter in meters if (rate := meter.rate) is not None]
    usual = sum(known) / len(known) if known else PREFILL_RATE
    return [usual if (rate := meter.rate) is None else rate for meter in meters]


def weight(key: str, slot: Slot) -> bytes:
    """The place of a slot in the key's order: the highest comes first."""
    return blake2b(f"{key} {slot.url} {slot.rank}".encode(), digest_size=8).digest()


def bound(in_flight: int, slots: int, excess: float = EXCESS) -> int:
    """How many calls a slot may have when `in_flight` are out and one more comes. Some slot always has fewer."""
    return max(SPARE, ceil((1 + excess) * (in_flight + 1) / slots))


def cost(load: Load, length: int) -> float:
    """Seconds that a prompt of `length` tokens costs there: its own wait, and what it adds to that of others."""
    return (load.waiting + OWN * max(0, length - load.cached)) / load.rate


def choose(key: str, length: int, loads: Sequence[Load]) -> Slot:
    """The slot for a prompt of `length` tokens. `loads` must not be empty."""
    if len(loads) == 1:
        return loads[0].slot
    total = sum(load.in_flight for load in loads)
    limit, staying = bound(total, len(loads)), bound(total, len(loads), STAYING)
    free = [load for load in loads if load.in_flight < (staying if 2 * load.cached >= length else limit)]
    first = max(free, key=lambda load: weight(key, load.slot))
    best = min(free, key=lambda load: cost(load, length))
    return (best if cost(best, length) < SAVING * cost(first, length) else first).slot
