"""Stage 6: experts in the shape of Qwen3-30B-A3B. Grouped products against the loop over experts; routing replay.

Both ways are the trainer's own module (trainer/megatron/model/grouped.py); fp32 is the loop.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_stages.models import MIXED_SMALL, QWEN3_30B_A3B, Sizes, load_model, write_model
from benchmarks.gpu_stages.scene import Scene, one_rank, relative
from benchmarks.trees import group
from trainer.data.micro_batch import MicroBatch
from trainer.data.packing import ContextShard, pack
from trainer.megatron.model.experts import TreeRouter
from trainer.megatron.model.grouped import LocalExperts
from trainer.megatron.model.model import PolicyModel
from trainer.megatron.replay import ReplayCounter
from trainer.megatron.schedule import forward

TOKENS = (4_096, 32_768)
LAYERS = 2
Way = Callable[[LocalExperts, Tensor, Tensor, Tensor], Tensor]


def figures(scene: Scene) -> Iterator[dict[str, Any]]:
    sizes = (MIXED_SMALL if scene.small else QWEN3_30B_A3B).with_layers(LAYERS)
    yield {"experts": sizes.experts, "per_token": sizes.per_token}
    with one_rank():
        directory = write_model(scene, sizes)
        exact, half = (load_model(scene, directory, dtype) for dtype in (torch.float32, torch.bfloat16))
        yield {"replay": scene.tried(lambda: replay(scene, exact, half))}
        modules = [model.decoder.layers[0].mlp.experts for model in (exact, half)]
        by_tokens: dict[str, Any] = {}
        for tokens in (64, 256) if scene.small else TOKENS:
            by_tokens[str(tokens)] = scene.tried(partial(both_ways, scene, sizes, modules, tokens))
            yield {"tokens": by_tokens}


def loop(experts: LocalExperts, hidden: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    """Megatron's experts, one after the other."""
    return super(LocalExperts, experts).forward(hidden, counts, weights)[0]


def grouped(experts: LocalExperts, hidden: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    """All experts in two grouped products."""
    return experts.grouped(hidden, counts, weights)


def both_ways(scene: Scene, sizes: Sizes, modules: list[LocalExperts], tokens: int) -> dict[str, Any]:
    """Time of forward and backward of one layer's experts, and how far both ways are from fp32."""
    exact, half = modules
    generator = torch.Generator(scene.device).manual_seed(0)
    rows = tokens * sizes.per_token
    hidden, upstream = (
        torch.randn(rows, sizes.hidden, generator=generator, device=scene.device).bfloat16() for _ in range(2)
    )
    weights = torch.rand(rows, generator=generator, device=scene.device)
    chosen = torch.randint(sizes.experts, (rows,), generator=generator, device=scene.device)
    counts = chosen.bincount(minlength=sizes.experts).cpu()  # Megatron counts on the CPU

    def passes(module: LocalExperts, way: Way) -> list[Tensor]:
        dtype = next(module.parameters()).dtype
        inputs = [hidden.to(dtype).requires_grad_(), weights.clone().requires_grad_(), *module.parameters()]
        output = way(module, inputs[0], counts, inputs[1])
        return [output.detach(), *torch.autograd.grad(output, inputs, upstream.to(dtype))]

    measures: dict[str, Any] = {}
    expected = passes(exact, loop)
    for name, way in (("loop", loop), ("grouped", grouped)):
        apart = [relative(actual, right) for actual, right in zip(passes(half, way), expected, strict=True)]
        measures |= {
            f"ms_{name}": scene.milliseconds(partial(passes, half, way), 2 if scene.small else 5),
            f"difference_{name}": {"output": apart[0], "hidden": apart[1], "experts": float(np.max(apart[3:]))},
            f"peak_bytes_{name}": scene.peak_bytes(partial(passes, half, way)),
        }
    return measures | {"loop_over_grouped": measures["ms_loop"] / measures["ms_grouped"]}


def replay(scene: Scene, exact: PolicyModel, half: PolicyModel) -> dict[str, Any]:
    """Logprobs of bf16 against those of fp32: where routers choose, and where they replay what fp32 chose."""
    size = 64 if scene.small else 1024
    rows = group(random.Random(0), 4, 4 * size, size)
    packed = pack(rows, ContextShard(scene.device))[0]
    choices, right = recorded(exact, packed)
    free = forward(half, [packed])[0]
    half.replay_counter = ReplayCounter(scene.device)
    forced = forward(half, [replace(packed, experts=choices)])[0]
    metrics = half.replay_counter.metrics()
    half.replay_counter = None
    apart = {"own": (free - right).abs(), "replay": (forced - right).abs()}
    return metrics | {
        "tokens": len(packed.tokens),
        "mean_logprob_difference": {name: float(values.mean()) for name, values in apart.items()},
        "largest_logprob_difference": {name: float(values.max()) for name, values in apart.items()},
    }


def recorded(model: PolicyModel, packed: MicroBatch) -> tuple[Tensor, Tensor]:
    """[N, layers, experts per token] what the routers choose, in rising order, and the logprobs."""
    chosen: list[Tensor] = []

    def note(router: TreeRouter, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        chosen.append(output[1].nonzero()[:, 1].view(len(output[1]), -1))

    hooks = [layer.mlp.router.register_forward_hook(note) for layer in model.decoder.layers]
    logp = forward(model, [packed])[0]
    for hook in hooks:
        hook.remove()
    return torch.stack(chosen, dim=1).to(torch.int16), logp
