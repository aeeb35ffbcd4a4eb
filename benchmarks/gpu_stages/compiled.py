"""Stage 8: where torch.compile and CUDA graphs would pay. The trainer uses neither beside its attention kernel.

Forward and backward of a norm, a feed-forward network and the head's loss of Qwen3-4B's shape: as they are, compiled,
and as a CUDA graph; and a whole pass over a small micro-batch, which waits for launches most, as it is and as a graph.
"""

import random
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_stages.models import DENSE_SMALL, QWEN3_4B, load_model, write_model
from benchmarks.gpu_stages.scene import Scene, one_rank, relative
from benchmarks.trees import group
from trainer.data.packing import ContextShard, pack
from trainer.megatron.model.model import PolicyModel

TOKENS = 4_096
LAYERS = 2


def figures(scene: Scene) -> Iterator[dict[str, Any]]:
    sizes = DENSE_SMALL if scene.small else QWEN3_4B.with_layers(LAYERS)
    yield {"tokens": 64 if scene.small else TOKENS}
    with one_rank():
        model = load_model(scene, write_model(scene, sizes), torch.bfloat16)
        for name, (module, inputs) in parts(scene, model).items():
            yield {name: scene.tried(partial(three_ways, scene, module, inputs))}
        yield {"small_pass": scene.tried(lambda: small_pass(scene, model))}


class HeadLoss(torch.nn.Module):
    """The head's loss on hidden states, for labels that stay the same."""

    def __init__(self, model: PolicyModel, labels: Tensor):
        super().__init__()
        self.model, self.labels = [model], labels  # in a list, so that of its weights only the head is this module's
        self.weight = model.shared_embedding_or_output_weight()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.model[0]._losses(hidden, self.labels, self.model[0]._head_weight())


class FeedForward(torch.nn.Module):
    """Megatron's feed-forward network, without the bias that it returns beside its output."""

    def __init__(self, mlp: torch.nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, hidden: Tensor) -> Tensor:
        return self.mlp(hidden)[0]


def parts(scene: Scene, model: PolicyModel) -> dict[str, tuple[torch.nn.Module, Tensor]]:
    """The modules to measure, each with its input."""
    generator = torch.Generator(scene.device).manual_seed(0)
    tokens, layer = 64 if scene.small else TOKENS, model.decoder.layers[0]
    shape = (tokens, 1, model.config.hidden_size)
    hidden = torch.randn(shape, generator=generator, device=scene.device).bfloat16().requires_grad_()
    labels = torch.randint(model.vocab_size, (1, tokens), generator=generator, device=scene.device)
    return {
        "norm": (layer.input_layernorm, hidden),
        "feed_forward": (FeedForward(layer.mlp), hidden),
        "head_loss": (HeadLoss(model, labels), hidden),
    }


def three_ways(scene: Scene, module: torch.nn.Module, hidden: Tensor) -> dict[str, Any]:
    """Milliseconds of forward and backward in each way, and how far its gradient is from that of the plain module."""
    plain = input_gradient(module, hidden)
    # On a CPU the compiler writes C++ for many seconds. There both passes are traced, and their graphs run as they are.
    compiled = torch.compile(module, backend="inductor" if scene.gpu else "aot_eager")
    ways: dict[str, Any] = {"plain": module, "compiled": compiled}
    if scene.gpu:  # a copy that shares the parameters, as its `forward` is replaced
        ways["graph"] = torch.cuda.make_graphed_callables(copy(module), (hidden.detach().clone().requires_grad_(),))
    repeats = 2 if scene.small else 20
    return {
        "ms": {name: scene.milliseconds(partial(input_gradient, way, hidden), repeats) for name, way in ways.items()},
        "difference": {name: relative(input_gradient(way, hidden), plain) for name, way in ways.items()},
    }


def input_gradient(module: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    """Forward and backward; returns the gradient of the input."""
    hidden.grad = None
    module(hidden).float().square().mean().backward()
    assert hidden.grad is not None
    return hidden.grad.clone()


def small_pass(scene: Scene, model: PolicyModel) -> dict[str, Any]:
    """A pass over some hundred tokens: as it is, and as one graph, which no launch slows down."""
    packed = pack(group(random.Random(0), 4, 256, 64), ContextShard(scene.device))[0]

    layout = model._layout(packed)
    # A graph cannot copy the mask's numbers from the CPU again.
    model._layout = lambda packed: layout  # type: ignore[method-assign]

    def compute() -> None:
        model(packed).sum().backward()

    repeats = 2 if scene.small else 20
    plain = {"tokens": len(packed.tokens), "ms_plain": scene.milliseconds(compute, repeats)}
    return plain | graphed(scene, compute, repeats)


def graphed(scene: Scene, compute: Callable[[], None], repeats: int) -> dict[str, Any]:
    """The same as a CUDA graph."""
    if not scene.gpu:
        return {}
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute()
    return {"ms_graph": scene.milliseconds(graph.replay, repeats)}
