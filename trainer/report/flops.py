"""What a step computes: tokens, attended keys, FLOPs, and what a device could do in the same time.

Left out: recomputation, the optimizer and communication, which model FLOPs do not count.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.config.model_shape import Shape
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
"""Dense bf16 FLOPs per second by the device's name, from NVIDIA's data sheets. A device that is not here has no MFU."""


@dataclass(frozen=True)
class Work:
    """What a model computes."""

    tokens: int = 0
    keys: int = 0
    """Pairs of a query and a key it attends to."""
    asked: int = 0
    """Logprobs: rows of logits."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.tokens + other.tokens, self.keys + other.keys, self.asked + other.asked)


def merged(rows: Sequence[TrainingRow]) -> Work:
    """The work of these rows as trees: every distinct token once, its keys being its ancestors and itself."""
    if not rows:
        return Work()
    tree = build(rows)
    return Work(len(tree.tokens), int((tree.positions + 1).sum()), len(tree.parents))


def separate(lengths: Sequence[int], asked: int) -> Work:
    """The work of sequences of so many inputs, each by itself, with so many trained tokens in all."""
    sizes = np.asarray(lengths, dtype=np.int64)
    return Work(int(sizes.sum()), int((sizes * (sizes + 1)).sum()) // 2, asked)


def flops(shape: Shape, work: Work) -> float:
    """FLOPs of forward and backward: 6 per weight and token, 12 per key and width of a layer's attention.

    Of a mixture of experts those weights that a token passes through, without the router's. The embedding multiplies
    nothing; the head is computed where a logprob is asked for.
    """
    width, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = shape.hidden * (2 * width + 2 * keys + 3 * shape.token_ffn())
    layer = 2 * weights * work.tokens + 4 * width * work.keys
    return 3.0 * (shape.layers * layer + 2 * shape.hidden * shape.vocab * work.asked)


def peak(device: str, precision: str) -> float | None:
    """FLOPs per second that the device could do in this precision; None where that is not known."""
    return PEAKS.get(device) if precision == "bfloat16" else None
