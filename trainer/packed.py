"""One micro-batch as the model takes it: prefix trees end to end in a single row."""

from dataclasses import dataclass

from torch import Tensor

from trainer.tree import Run


@dataclass(frozen=True)
class Packed:
    """Tokens of several trees, and the places that need a logprob."""

    tokens: Tensor
    """[N], each tree in depth-first pre-order."""
    positions: Tensor
    """[N], the depth of each token in its tree."""
    runs: tuple[Run, ...]
    """What attends to what."""
    rows: Tensor
    """[edges] indices into `tokens` whose next token is asked for."""
    labels: Tensor
    """[edges] those next tokens."""
    branches: Tensor
    """[trained tokens] which edge each of the flat trained tokens is."""
    queries: tuple[int, int]
    """Which of the trees' tokens `tokens` is: all of them, or this rank's stretch where ranks share a micro-batch."""
