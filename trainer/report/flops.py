"""How much a step computes: tokens, attended keys, FLOPs; and the peak FLOPs of devices.

Model FLOPs do not count recomputation, the optimizer and communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.config.model_shape import ModelShape
from trainer.data.row import TrainingRow
from trainer.data.tree import build

PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA GH200 480GB": 989.4e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA B200": 2250e12,
}
"""Dense bf16 FLOPs per second by device name, from NVIDIA's data sheets. A device that is missing here has no MFU."""


@dataclass(frozen=True)
class Workload:
    """How much a model computes."""

    tokens: int = 0
    keys: int = 0
    """Pairs of a query and a key it attends to."""
    logprobs: int = 0
    """Rows of logits."""

    def __add__(self, other: "Workload") -> "Workload":
        return Workload(self.tokens + other.tokens, self.keys + other.keys, self.logprobs + other.logprobs)


def merged(rows: Sequence[TrainingRow]) -> Workload:
    """Count these rows as prefix trees: every distinct token once, its keys being its ancestors and itself."""
    if not rows:
        return Workload()
    tree = build(rows)
    return Workload(len(tree.tokens), int((tree.positions + 1).sum()), len(tree.parents))


def separate(lengths: Sequence[int], logprobs: int) -> Workload:
    """Count sequences of these lengths, each computed by itself, with `logprobs` trained tokens in all."""
    sizes = np.asarray(lengths, dtype=np.int64)
    return Workload(int(sizes.sum()), int((sizes * (sizes + 1)).sum()) // 2, logprobs)


def flops(shape: ModelShape, work: Workload) -> float:
    """Return the FLOPs of forward and backward: 6 per weight and token, 12 per key and width of a layer's attention.

    The estimate of PaLM (arXiv 2204.02311, appendix B), with the keys that are attended instead of all. In a
    mixture of experts it counts the weights that a token passes through, without the router's. The embedding is a
    lookup; the head is computed only where a logprob is needed.
    """
    width, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = shape.hidden * (2 * width + 2 * keys + 3 * shape.token_ffn())
    layer = 2 * weights * work.tokens + 4 * width * work.keys
    return 3.0 * (shape.layers * layer + 2 * shape.hidden * shape.vocab * work.logprobs)


def peak(device: str, precision: str) -> float | None:
    """Return the peak FLOPs per second of a device in this precision; None where it is not known."""
    return PEAKS.get(device) if precision == "bfloat16" else None
