"""One micro-batch as the model takes it: sequences end to end in a single row."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Packed:
    """Tokens of several sequences, and the places that need a logprob."""

    tokens: Tensor
    positions: Tensor
    """0, 1, 2, ... within each sequence."""
    lengths: tuple[int, ...]
    """Of the sequences, in order."""
    rows: Tensor
    """Indices into `tokens` whose next token is asked for."""
    labels: Tensor
    """Those next tokens."""
