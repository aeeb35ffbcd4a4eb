"""One micro-batch as the model takes it: prefix trees end to end in a single row."""

from dataclasses import dataclass

from torch import Tensor

from trainer.data.tree import TokenRun


@dataclass(frozen=True)
class SequencePaths:
    """Which sequences pass through which tokens. Sequences are numbered by where they end, so each token's are a range.

    Of a sequence only what the model computes counts: not the tokens behind the one that precedes its last trained one.
    """

    first: Tensor
    """[N] the first sequence through each token."""
    end: Tensor
    """[N] the one behind its last; of padding, the first itself."""
    lengths: Tensor
    """[sequences] tokens, in double precision."""
    weights: Tensor
    """[sequences] trained tokens, likewise."""


@dataclass(frozen=True)
class MicroBatch:
    """Tokens of several trees, and the places that need a logprob."""

    tokens: Tensor
    """[N], each tree in depth-first pre-order."""
    positions: Tensor
    """[N], the depth of each token in its tree."""
    runs: tuple[TokenRun, ...]
    """What attends to what."""
    rows: Tensor
    """[edges] indices into `tokens` whose next token is asked for."""
    labels: Tensor
    """[edges] those next tokens."""
    branches: Tensor
    """[trained tokens] which edge each of the flat trained tokens is."""
    queries: tuple[int, int]
    """Which of the trees' tokens `tokens` is: all of them, or this rank's stretch where ranks share a micro-batch."""
    paths: SequencePaths | None = None
    """Of these tokens; absent where nothing asks for it."""
    experts: Tensor | None = None
    """[N, layers, experts per token] what the routers replay (trainer/data/routed_experts.py); None: they choose."""
