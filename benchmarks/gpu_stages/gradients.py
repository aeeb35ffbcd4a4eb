"""Stage 7: gradients in bf16 against those in fp32, tensor by tensor; the head in bf16 and in fp32, in one piece and
in chunks of logits.

A few layers of Qwen3-1.7B's shape; the weights are the same and exact in bf16. `difference` is the norm of the
difference over the norm in fp32.
"""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_stages.models import DENSE_SMALL, QWEN3_1_7B, make_policy, write_model
from benchmarks.gpu_stages.scene import Scene, one_rank, relative
from benchmarks.trees import RULE, group
from trainer.data.packing import pack
from trainer.data.row import TrainingRow
from trainer.loss.policy_loss import policy_loss
from trainer.policy import Policy

LAYERS = 4
WORST = 5
"""Tensors that are named, of those furthest from fp32."""


def figures(scene: Scene) -> Iterator[dict[str, Any]]:
    sizes = DENSE_SMALL if scene.small else QWEN3_1_7B.with_layers(LAYERS)
    size = 64 if scene.small else 1024
    rows = group(random.Random(0), 8, 4 * size, size)
    trained = 8 * size
    with one_rank() as ranks:
        model = write_model(scene, sizes)
        exact = passes(make_policy(scene, ranks, model, precision="float32"), rows, trained)
        yield {"trained_tokens": trained, "tensors": len(exact[1])}
        for name, head in (("bfloat16", False), ("bfloat16_head_float32", True)):
            policy = make_policy(scene, ranks, model, head_float32=head)
            for chunks in (1, 8):
                part = partial(compared, policy, rows, trained // chunks, exact)
                yield {f"{name}_{chunks}_chunks": scene.tried(part)}
            del policy, part
            scene.free()


def passes(policy: Policy, rows: list[TrainingRow], logits_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Logprobs, and the gradient of each tensor."""
    policy.model.logits_tokens = logits_tokens
    policy.ddp.zero_grad_buffer()
    packed, tokens = pack(rows, policy.shard)
    logp = policy.ddp(packed)[packed.branches]
    policy_loss(logp, tokens, RULE)[0].backward()
    gradients = {name: param.main_grad.clone() for name, param in policy.model.named_parameters()}
    return logp.detach().float(), gradients


def compared(
    policy: Policy, rows: list[TrainingRow], logits_tokens: int, exact: tuple[Tensor, dict[str, Tensor]]
) -> dict[str, Any]:
    """How far a pass is from the one in fp32."""
    logp, gradients = passes(policy, rows, logits_tokens)
    gaps = (logp - exact[0]).abs()
    apart = {name: relative(gradient, exact[1][name]) for name, gradient in gradients.items()}
    worst = sorted(apart, key=lambda name: -apart[name])[:WORST]
    whole, right = (torch.cat([one[name].flatten() for name in apart]) for one in (gradients, exact[1]))
    return {
        "logprob_mean": float(gaps.mean()),
        "logprob_largest": float(gaps.max()),
        "difference": relative(whole, right),
        "difference_by_kind": by_kind(apart),
        "worst": {name: apart[name] for name in worst},
    }


def by_kind(apart: dict[str, float]) -> dict[str, float]:
    """The largest difference over the layers, by the tensor's name within a layer."""
    largest: dict[str, float] = {}
    for name, value in apart.items():
        kind = name.split(".", 3)[-1] if name.startswith("decoder.layers.") else name
        largest[kind] = float(np.maximum(largest.get(kind, 0.0), value))  # NaN stays NaN
    return largest
