"""Stage 1: tree attention. Agreement with the dense mask, time against causal flash attention, compilations, memory.

The kernel is the trainer's own for this device (trainer/megatron/attention/kernels.py): MagiAttention or FlexAttention
on a GPU, slices on a CPU.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import isqrt
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_stages.scene import Scene, relative
from trainer.data.row import TrainingRow
from trainer.data.tree import build
from trainer.megatron.attention import kernels, magi
from trainer.megatron.attention.layout import AttentionLayout


@dataclass(frozen=True)
class Heads:
    """The heads of an attention layer."""

    queries: int
    keys: int
    width: int

    @property
    def scale(self) -> float:
        return self.width**-0.5


FULL, SMALL = Heads(32, 8, 128), Heads(2, 1, 16)
"""Qwen3-4B's, and some for a CPU."""
LENGTHS = (8_192, 16_384, 32_768, 65_536, 131_072)
TREES = 50


def figures(scene: Scene) -> Iterator[dict[str, Any]]:
    heads = SMALL if scene.small else FULL
    query = torch.empty(1, heads.queries, 1, heads.width, dtype=torch.bfloat16, device=scene.device)
    gpu_kernel = "magi_attention" if magi.fits(query) else "flex_attention"
    yield {"kernel": gpu_kernel if scene.gpu else "slices"}
    yield {"difference_of_dense": scene.tried(lambda: differences(scene, heads))}
    yield {"compilations": scene.tried(lambda: compilations(scene, heads))}
    times: dict[str, Any] = {}
    for length in (256,) if scene.small else LENGTHS:
        times[str(length)] = scene.tried(partial(against_flash, scene, heads, length))
        yield {"tokens": times}


def trie(draw: random.Random, branches: int, longest: int) -> AttentionLayout:
    """The layout of a random trie: each path leaves an earlier one anywhere, and goes on for up to `longest` tokens."""
    paths: list[list[int]] = [[0]]
    for _ in range(branches):
        before = draw.choice(paths)
        start = before[: draw.randint(1, len(before))]
        paths.append(start + [draw.randrange(1000) for _ in range(draw.randint(1, longest))])
    return layout_of([one_row(path) for path in paths[1:]])


def group(members: int, prompt: int, reply: int) -> AttentionLayout:
    """The layout of a group: members of `reply` tokens that share their prompt."""
    shared = list(range(prompt))
    return layout_of([one_row([*shared, *([-1 - member] * (reply + 1))]) for member in range(members)])


def one_row(path: list[int]) -> TrainingRow:
    """A row whose last token is trained, so that the model computes all before it."""
    size = len(path)
    trained, zeros = np.arange(size) == size - 1, np.zeros(size, dtype=np.float32)
    return TrainingRow(np.array(path) + 1000, trained, zeros, zeros, np.zeros(size, dtype=np.int64))


def layout_of(rows: list[TrainingRow]) -> AttentionLayout:
    runs = tuple(build([row for row in rows if row.inputs]).runs)
    return AttentionLayout(runs, (0, runs[-1].end))


def pairs_of(layout: AttentionLayout) -> int:
    """How many pairs of a query and a key attend."""
    sizes = [(run.end - run.start, run.last - run.end) for run in layout.runs]
    return sum(own * (own + 1) // 2 + own * below for own, below in sizes)


def inputs(scene: Scene, heads: Heads, tokens: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Random queries, keys, values and upstream gradients of `tokens` tokens; the first three want a gradient."""
    generator = torch.Generator(scene.device).manual_seed(seed)
    shapes = [(1, count, tokens, heads.width) for count in (heads.queries, heads.keys, heads.keys, heads.queries)]
    drawn = [torch.randn(shape, generator=generator, device=scene.device).to(dtype) for shape in shapes]
    return [one.requires_grad_() for one in drawn[:3]] + drawn[3:]


def passes(attend: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """Output and the gradients of queries, keys and values."""
    query, key, value, upstream = tensors
    output = attend(query, key, value)
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), upstream)]


def dense(layout: AttentionLayout, scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention by the N x N mask."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        last = torch.tensor([run.last for run in layout.runs for _ in range(run.start, run.end)], device=query.device)
        place = torch.arange(len(last), device=query.device)
        mask = (place[None] <= place[:, None]) & (place[:, None] < last[None])
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], dim=1) for part in (key, value))
        scores = (query @ key.transpose(2, 3) * scale).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ value

    return attend


def tree(layout: AttentionLayout, scale: float) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The trainer's kernel."""
    return lambda query, key, value: kernels.tree_attention(query, key, value, layout, scale)


def differences(scene: Scene, heads: Heads) -> dict[str, Any]:
    """The largest relative difference of float64 by the dense mask, over random tries: output and gradients."""
    worst: dict[str, dict[str, float]] = {}
    for seed in range(2 if scene.small else 8):
        # The first is shorter than a block of the kernel, for which torch would choose another one.
        layout = trie(random.Random(seed), 12, 40 if scene.small else 400) if seed else trie(random.Random(0), 6, 30)
        for dtype in (torch.float32, torch.bfloat16):
            tensors = inputs(scene, heads, layout.queries[1], dtype, seed)
            exact = passes(dense(layout, heads.scale), [one.detach().double().requires_grad_() for one in tensors])
            merged = passes(tree(layout, heads.scale), tensors)
            known = worst.setdefault(str(dtype).removeprefix("torch."), {})
            for name, actual, expected in zip(("output", "query", "key", "value"), merged, exact, strict=True):
                known[name] = float(np.maximum(known.get(name, 0.0), relative(actual, expected)))
    return worst


def compilations(scene: Scene, heads: Heads) -> dict[str, Any]:
    """How often torch compiled for 50 trees of different shapes, forward and backward.

    Without a GPU nothing is compiled by the trainer; there the same kernel is traced, which is what counts as one.
    """
    from torch._dynamo.utils import counters
    from torch.nn.attention.flex_attention import flex_attention

    from trainer.megatron.attention.flex import block_mask

    traced = torch.compile(flex_attention, dynamic=True, backend="eager")
    torch._dynamo.reset()  # kernels that an earlier part compiled would not be counted
    counters.clear()
    draw = random.Random(7)
    for seed in range(TREES):
        layout = trie(draw, draw.randint(2, 20), draw.randint(20, 40 if scene.small else 600))
        tensors = inputs(scene, heads, layout.queries[1], torch.float32 if scene.small else torch.bfloat16, seed)
        if scene.gpu:
            passes(tree(layout, heads.scale), tensors)
        else:
            query, key, value = (one.detach() for one in tensors[:3])  # torch has the backward pass for GPUs only
            mask = block_mask(layout, scene.device)
            traced(query, key, value, block_mask=mask, scale=heads.scale, enable_gqa=True)
    return {"trees": TREES, "count": counters["stats"]["unique_graphs"]}


def against_flash(scene: Scene, heads: Heads, tokens: int) -> dict[str, Any]:
    """Forward and backward over a tree of so many tokens, against causal flash attention over as many pairs."""
    layout = group(8, tokens // 2, tokens // 16)
    pairs = pairs_of(layout)
    single = (isqrt(8 * pairs + 1) - 1) // 2  # the length of one sequence with as many pairs
    repeats = 1 if scene.small else 5
    tensors = inputs(scene, heads, layout.queries[1], torch.bfloat16)
    attend = tree(layout, heads.scale)
    by_tree = scene.milliseconds(lambda: passes(attend, tensors), repeats)
    peak = scene.peak_bytes(lambda: passes(attend, tensors))
    straight = inputs(scene, heads, single, torch.bfloat16)
    by_flash = scene.milliseconds(lambda: passes(flash, straight), repeats)
    # Two products forward; the backward pass computes the first one again and four more.
    flops = 14 * heads.queries * heads.width * pairs
    return {
        "pairs": pairs,
        "flash_tokens": single,
        "ms_tree": by_tree,
        "ms_flash": by_flash,
        "tree_over_flash": by_tree / by_flash,
        "tflops_tree": flops / by_tree / 1e9,
        "tflops_flash": flops / by_flash / 1e9,
        "peak_bytes": peak,
        "peak_over_square": peak / layout.queries[1] ** 2,
    }


def flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """torch's causal attention, by flash attention where it can."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
