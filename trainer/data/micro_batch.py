"""One micro-batch in the form that the model takes: prefix trees one after the other in a single sequence."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trainer.data.tree import TokenRun


@dataclass(frozen=True)
class SequencePaths:
    """Which sequences pass through which tokens.

    Sequences are numbered by where they end in the micro-batch, so the sequences of a token are a range. Of each
    sequence, only the tokens that the model computes count: up to the one before its last trained token.
    """

    first: Tensor
    """[N] the first sequence through each token."""
    end: Tensor
    """[N] one past the last sequence through each token; equal to `first` for padding."""
    lengths: Tensor
    """[sequences] tokens of each, in float64."""
    weights: Tensor
    """[sequences] trained tokens of each, in float64; 0 of a sequence that is masked whole."""


@dataclass(frozen=True)
class MicroBatch:
    """The tokens of several trees, and which of them need a logprob. N: the tokens that this rank computes.

    An edge is a trained token as the child of the token before it; rows that share both share the edge.
    """

    tokens: Tensor
    """[N] token ids, each tree in depth-first pre-order."""
    positions: Tensor
    """[N] the depth of each token in its tree."""
    runs: tuple[TokenRun, ...]
    """The runs of the trees: what attention is computed from."""
    rows: Tensor
    """[edges] indices into `tokens`: at these, the logprob of the next token is needed."""
    labels: Tensor
    """[edges] those next tokens."""
    branches: Tensor
    """[trained tokens] the edge of each, with the rows' trained tokens concatenated."""
    nodes: np.ndarray
    """[trained tokens] the index in `tokens` at which each is predicted: `rows[branches]`, but not on a GPU."""
    queries: tuple[int, int]
    """[first, end): which of the trees' tokens `tokens` are. All, or a stretch where ranks share a micro-batch."""
    paths: SequencePaths | None = None
    """The sequences through these tokens. None where the model does not need them."""
    experts: Tensor | None = None
    """[N, layers, experts per token] recorded experts (trainer/data/routed_experts.py). None: routers choose."""
