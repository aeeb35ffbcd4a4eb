"""How many bytes a rank holds between steps, from the model's shape alone: weights, gradients and optimizer.

Left out: activations and logits of a micro-batch, which `batch.max_tokens` and `parallel.recompute` bound; the padding
of a distributed optimizer's buffers.
"""

from dataclasses import dataclass

from trainer.config import Config, Parallel
from trainer.config.model_shape import ModelShape

NUMBER = {"float32": 4, "bfloat16": 2}
"""Bytes of a weight by `parallel.precision`."""
GRADIENT = 4
"""Gradients add up in fp32 (trainer/megatron/optimizer.py)."""
MOMENTS = 8
"""Adam's two moments, in fp32."""
MAIN = {"float32": 0, "bfloat16": 4}
"""The optimizer's own copy of the weights, in fp32."""


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters: those that data ranks share, and those of experts, which expert ranks divide."""

    dense: int
    experts: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(self.dense + other.dense, self.experts + other.experts)

    @property
    def total(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class Held:
    """Bytes of one rank, of the pipeline stage that holds most."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    """The initial model, for loss.kl."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference


def held(shape: ModelShape, config: Config) -> Held:
    """Estimate what each rank holds."""
    parallel = config.parallel
    counts = max(
        (stage_parameters(shape, parallel, stage) for stage in range(parallel.pipeline)), key=lambda stage: stage.total
    )
    number, trained = NUMBER[parallel.precision], counts
    if config.mtp.drafts:
        trained = counts + head_parameters(shape, parallel)
    state = MOMENTS + MAIN[parallel.precision]
    optimizer = trained.total * state
    if parallel.distributed_optimizer:
        ranks = parallel.processes // parallel.pipeline
        data = parallel.processes // parallel.copy * parallel.context
        optimizer = -(-trained.dense * state // data) - (-trained.experts * state // (ranks // parallel.expert))
    return Held(
        weights=trained.total * number,
        gradients=trained.total * GRADIENT,
        optimizer=optimizer,
        reference=counts.total * number if config.loss.kl else 0,
    )


def checkpoint_bytes(shape: ModelShape, precision: str) -> int:
    """Bytes of one checkpoint and one exported model on disk, over all ranks."""
    number = NUMBER[precision]
    return stage_parameters(shape, Parallel(), 0).total * (number + MOMENTS + MAIN[precision] + number)


def stage_parameters(shape: ModelShape, parallel: Parallel, stage: int) -> Counts:
    """Count the parameters of one pipeline stage on one of its ranks."""
    layers = shape.layers // parallel.pipeline
    first, last = stage == 0, stage == parallel.pipeline - 1
    counts = sum(
        (layer_parameters(shape, parallel, layer) for layer in range(stage * layers, (stage + 1) * layers)), Counts(0)
    )
    vocabulary = shape.vocab * shape.hidden // parallel.tensor
    matrices = int(first) + int(last and not (shape.tied and first))
    return counts + Counts(matrices * vocabulary + (shape.hidden if last else 0))


def layer_parameters(shape: ModelShape, parallel: Parallel, layer: int) -> Counts:
    """Count the parameters of one layer on one of the ranks that share it."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = (2 * queries + 2 * keys) * shape.hidden
    if shape.family in ("qwen2", "mimo"):  # biases of q, k and v
        attention += queries + 2 * keys
    norms = 2 * shape.hidden + (2 * shape.head_dim if shape.family in ("qwen3", "qwen3_moe") else 0)
    if shape.experts is None or not shape.experts.layers[layer]:
        return Counts((attention + 3 * shape.hidden * shape.ffn) // parallel.tensor + norms)
    experts = 3 * shape.hidden * shape.experts.ffn * shape.experts.count // parallel.expert
    router = shape.experts.count * shape.hidden
    return Counts(attention // parallel.tensor + norms + router, experts)


def head_parameters(shape: ModelShape, parallel: Parallel) -> Counts:
    """Count the parameters of the head that drafts: a layer like the model's first, a projection, three norms."""
    return layer_parameters(shape, parallel, 0) + Counts(2 * shape.hidden * shape.hidden + 3 * shape.hidden)
