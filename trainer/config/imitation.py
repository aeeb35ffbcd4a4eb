"""The tables [[imitation]] of the trainer's configuration: recorded rollouts that steps imitate beside their own."""

import msgspec

from proxy.pool.settings_file import Count, Positive


class Imitation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table: a source, and what it weighs."""

    run: str
    """Name of the run in the pool whose recorded rollouts are imitated."""
    weight: Positive
    """Factor of the source's loss, the mean over its tokens of -log p, beside that of the policy loss, which is 1."""
    rows: Count = 8
    """Sequences of each step, drawn again in each. A source with fewer is taken as a whole."""
    min_reward: float | None = None
    """Imitate only rollouts of at least this reward. Default: all."""
