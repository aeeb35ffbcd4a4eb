"""Notices that an answer does nothing but repeat itself, so that the engine need not sample it up to the token limit.

The answer is cut into blocks of 64 tokens. A block repeats when the same tokens also stand at a place that begins in
the 256 tokens before it, so a loop of up to 256 tokens shows. When 60 of the last 64 blocks repeat, and the newest is
one of them, the answer is ended behind that block, after 3,904 tokens at the least. The other four are for slips, after
which a policy that samples at temperature 1 falls back into its loop.

The place depends on the tokens alone, not on how many come in one event. Counters, ids and data keep honest tables,
lists and code below: one new token per row makes at least every fourth block new, as no loop is longer than 256 tokens.
What docs/behaviour.md says of false alarms is measured by benchmarks/repetition.py. Left out: probabilities
(MiniMax-M1 ends an answer after 3,000 tokens above 0.99 each), because a file that an agent copies is as certain, and
loops that change in each round, because tables do too.
"""

from array import array

BLOCK = 64
"""Tokens that are looked for together."""
REACH = 256
"""How many tokens before a block the other place may begin."""
BLOCKS, REPEATED = 64, 60
"""How many blocks are remembered, and how many of them end the answer when they repeat."""


class RepetitionWatch:
    """Follows one answer."""

    def __init__(self) -> None:
        self._size = 0  # tokens that were looked at, whole blocks
        self.repeats = 0
        """A bit for each remembered block, the newest lowest: whether it repeats."""

    def end(self, ids: "array[int]", size: int) -> int | None:
        """Look at the first `size` tokens of the answer; return how many of them end it, None while it goes on."""
        while self._size + BLOCK <= size:
            start, self._size = self._size, self._size + BLOCK
            repeats = _repeats(ids, start)
            self.repeats = (self.repeats << 1 | repeats) & ((1 << BLOCKS) - 1)
            if repeats and self.repeats.bit_count() >= REPEATED:
                return self._size
        return None


def _repeats(ids: "array[int]", start: int) -> bool:
    """Whether the block that begins at `start` also begins at one of the `REACH` places before."""
    block = ids[start : start + BLOCK].tobytes()
    before = ids[max(0, start - REACH) : start + BLOCK - 1].tobytes()
    at = before.find(block)
    while at % ids.itemsize and at >= 0:  # bytes of several tokens that happen to look like the block
        at = before.find(block, at + 1)
    return at >= 0
