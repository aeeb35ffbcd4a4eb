"""Stage 3: one path of 200,000 tokens, and a group of 8 that shares 150,000, with recompute.

One layer of Qwen3-4B is measured. `activation_bytes` is what forward and backward passes take at their peak beside
weights, gradients and optimizer; a further layer adds the hidden states that recompute keeps, one vector per token.
"""

import random
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from benchmarks.gpu_stages.models import DENSE_SMALL, QWEN3_4B, Sizes, make_policy, write_model
from benchmarks.gpu_stages.scene import Scene, one_rank
from benchmarks.gpu_stages.stack import peak_of
from benchmarks.trees import forward_backward, group, history
from trainer.data.row import TrainingRow
from trainer.policy import Policy
from trainer.report.flops import flops, merged

PATH, SHARED, MEMBERS = 200_000, 150_000, 8
LAYERS = 1


def figures(scene: Scene) -> Iterator[dict[str, Any]]:
    sizes = DENSE_SMALL if scene.small else QWEN3_4B
    cut = 400 if scene.small else 1
    path, shared = PATH // cut, SHARED // cut
    batches = {
        "path": history(random.Random(0), 10, path // 10),
        "group8": group(random.Random(1), MEMBERS, shared, (path - shared) // MEMBERS // 2),
    }
    yield {"layers": sizes.layers, "measured_layers": LAYERS}
    with one_rank() as ranks:
        model = write_model(scene, sizes.with_layers(LAYERS))
        policy = make_policy(scene, ranks, model, recompute=True)
        forward_backward(policy, [history(random.Random(2), 4, path // 200)], merge=True)  # compiles the kernels
        for name, rows in batches.items():
            yield {name: scene.tried(partial(one_batch, scene, policy, rows, sizes))}


def one_batch(scene: Scene, policy: Policy, rows: list[TrainingRow], sizes: Sizes) -> dict[str, Any]:
    """One pass over all rows in one micro-batch, after one that compiles what this length still lacks."""
    work = merged(rows)
    forward_backward(policy, [rows], merge=True)
    scene.synchronize()
    began = time.perf_counter()
    peak = scene.peak_bytes(lambda: forward_backward(policy, [rows], merge=True))
    seconds = time.perf_counter() - began
    kept = work.tokens * sizes.hidden * 2  # bf16
    top = peak_of(scene)
    return {
        "tokens": work.tokens,
        "trained_tokens": work.logprobs,
        "pairs": work.keys,
        "seconds": seconds,
        "tokens_per_s": work.tokens / seconds,
        "mfu": None if top is None else flops(policy.shape, work) / seconds / top,
        "activation_bytes": peak,
        "activation_bytes_all_layers": peak + kept * (sizes.layers - LAYERS),
    }
