"""Chooses the replica, and its data-parallel rank, that samples a call: pure functions of a few numbers per slot.

A slot is one prefix cache: a replica, or one rank of it. The key of a call is its group, whose prompts share a prefix,
or else its attempt. Rendezvous hashing (Thaler and Ravishankar, 1998) orders the slots for each key, so that a slot
that comes or goes moves only its own share of the keys. Slots with too many calls in flight are skipped (consistent
hashing with bounded loads, Mirrokni et al., 2016). The first of the rest is taken, unless another is clearly cheaper:
fewer tokens to prefill before the first sampled one, counting those that wait there, at the rate measured there.
Left out: evictions that the engine does not report, the time to decode (the bound stands for it), prefixes in a shared
L3 cache, the load of other proxies.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil
from typing import NamedTuple

EXCESS = 0.25
"""How far a slot's calls in flight may exceed the mean of all slots when it takes a prompt that it has little of."""
STAYING = 0.5
"""The same where it has at least half of the prompt cached, so that rollouts do not move with every change of load."""
SPARE = 8
"""Calls that a slot may always have: spreading one group over idle slots gains nothing."""
OWN = 2
"""Weight of a token of the call's own prompt against a waiting one: prefilling it also delays the calls behind."""
SAVING = 0.8
"""Another slot is taken below this share of the first one's cost; rates and cached lengths are estimates."""
PREFILL_RATE = 10_000.0
"""Assumed tokens per second of prefill until a slot is measured; it cancels out where none is."""
MEASURABLE = 512
"""Prefilled tokens from which the time to the first token tells the rate."""
DECAY = 0.95
"""Weight of a measurement after the next one."""


class Slot(NamedTuple):
    """One prefix cache; `rank` is None where the replica has only one."""

    url: str
    rank: int | None = None


class SlotLoad(NamedTuple):
    """The load of a slot as one call finds it."""

    slot: Slot
    in_flight: int = 0
    """Calls sent there that have not ended."""
    waiting: int = 0
    """Tokens to prefill there before this call's."""
    cached: int = 0
    """Tokens of this call's prompt that are probably cached."""
    rate: float = PREFILL_RATE
    """Tokens per second that the slot prefills."""


@dataclass(frozen=True)
class PrefillMeter:
    """How fast a slot prefills: sums over past calls, each weighing DECAY times as much as the next one."""

    tokens: float = 0.0
    seconds: float = 0.0

    def measured(self, tokens: int, seconds: float) -> "PrefillMeter":
        """Add a call whose first token came `seconds` after it was sent, with `tokens` prefilled."""
        if tokens < MEASURABLE or seconds <= 0:
            return self
        return PrefillMeter(self.tokens * DECAY + tokens, self.seconds * DECAY + seconds)

    @property
    def rate(self) -> float | None:
        return self.tokens / self.seconds if self.seconds else None


def rates(meters: Sequence[PrefillMeter]) -> list[float]:
    """Tokens per second of each slot; unmeasured ones get the mean of the others, PREFILL_RATE if none is known."""
    known = [rate for meter in meters if (rate := meter.rate) is not None]
    usual = sum(known) / len(known) if known else PREFILL_RATE
    return [usual if (rate := meter.rate) is None else rate for meter in meters]


def weight(key: str, slot: Slot) -> bytes:
    """A slot's position in the key's order: the highest weight comes first."""
    return blake2b(f"{key} {slot.url} {slot.rank}".encode(), digest_size=8).digest()


def bound(in_flight: int, slots: int, excess: float = EXCESS) -> int:
    """How many calls a slot may have when `in_flight` are out and one more comes; some slot always has fewer."""
    return max(SPARE, ceil((1 + excess) * (in_flight + 1) / slots))


def cost(load: SlotLoad, length: int) -> float:
    """Seconds that a prompt of `length` tokens costs there: its own wait, and what it adds to that of others."""
    return (load.waiting + OWN * max(0, length - load.cached)) / load.rate


def choose(key: str, length: int, loads: Sequence[SlotLoad]) -> Slot:
    """The slot for a prompt of `length` tokens. `loads` must not be empty."""
    if len(loads) == 1:
        return loads[0].slot
    total = sum(load.in_flight for load in loads)
    limit, staying = bound(total, len(loads)), bound(total, len(loads), STAYING)
    free = [load for load in loads if load.in_flight < (staying if 2 * load.cached >= length else limit)]
    first = max(free, key=lambda load: weight(key, load.slot))
    best = min(free, key=lambda load: cost(load, length))
    return (best if cost(best, length) < SAVING * cost(first, length) else first).slot
