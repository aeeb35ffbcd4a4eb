"""Measure what prefix trees save on a GPU: one JSON object as the last line of output, and in the file of --out.

First attention alone, forward and backward in bf16: the tree kernel over distinct tokens (`tree`) against causal flash
attention over the completions one by one (`flat`), and against flash attention over one sequence of as many tokens as
the tree has (`chain`), which shows what the mask itself costs. Then whole steps by part, as benchmarks/trainer.py
measures them. The tree's output is compared with single precision. Left out: several GPUs. No page claims a figure of
it: this script has not been run on a GPU.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.recorded import Workload
from benchmarks.result import be_single_process, write_result
from benchmarks.steps import QUICK as QUICK_WORKLOAD
from benchmarks.steps import StepBench, parser, peak_mb, provenance, settings, three_ways
from benchmarks.trees import ModelSizes, compaction, group, history, write_model
from proxy.pool.errors import UserError
from trainer.config import Parallel
from trainer.data.row import TrainingRow
from trainer.data.tree import build
from trainer.megatron.attention.kernels import tree_attention
from trainer.megatron.attention.layout import AttentionLayout
from trainer.megatron.attention.magi import fits
from trainer.megatron.parallel import Ranks, process_groups
from trainer.policy import Policy

HEADS, KV_HEADS, WIDTH = 16, 8, 128
LARGE = ModelSizes(hidden=2048, layers=8, ffn=6144, heads=16, kv_heads=8, head_dim=128, vocab=32_768)
WORKLOAD = Workload(groups=4, members=8, turns=8, prompt=4000, observed=256, sampled=256, vocabulary=32_768)


def batches(quick: bool) -> dict[str, list[TrainingRow]]:
    """The batches whose attention is measured."""
    size = 64 if quick else 1024
    return {
        "12_turns": history(random.Random(0), 12, size // 2),
        "group8": group(random.Random(1), 8, 4 * size, size),
        "compaction": compaction(random.Random(2), 3, 8, size // 4),
    }


def heads(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Random queries, keys and values of `tokens` tokens."""
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = [(1, count, tokens, WIDTH) for count in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, device="cuda", generator=draw).to(dtype).requires_grad_() for shape in shapes]


def milliseconds(compute: Callable[[], Tensor], repeats: int) -> float:
    """Forward and backward pass: the median of `repeats` runs after three that warm up."""
    times = []
    for _ in range(3 + repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        compute().sum().backward()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[3:])


def flash(inputs: Sequence[Tensor]) -> Tensor:
    """torch's causal flash attention."""
    query, key, value = inputs
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def attention(rows: list[TrainingRow], repeats: int) -> dict[str, Any]:
    """The kernel over a tree against flash attention."""
    runs = tuple(build(rows).runs)
    size, scale = runs[-1].end, WIDTH**-0.5
    layout = AttentionLayout(runs, (0, size))
    inputs = heads(size, torch.bfloat16)
    singles = [heads(row.inputs, torch.bfloat16) for row in rows]
    with torch.no_grad():
        wide = [one.float() for one in inputs]
        exact = tree_attention(wide[0], wide[1], wide[2], layout, scale)
        output = tree_attention(inputs[0], inputs[1], inputs[2], layout, scale)
    tree = milliseconds(lambda: tree_attention(inputs[0], inputs[1], inputs[2], layout, scale), repeats)
    flat = milliseconds(lambda: torch.stack([flash(one).sum() for one in singles]), repeats)
    chain = milliseconds(lambda: flash(inputs), repeats)
    pairs = sum(row.inputs * (row.inputs + 1) // 2 for row in rows)
    own = int(sum((run.end - run.start) * (run.end - run.start + 1) // 2 for run in runs))
    own += sum((run.last - run.end) * (run.end - run.start) for run in runs)
    return {
        "tokens_tree": size,
        "tokens_flat": int(np.sum([row.inputs for row in rows])),
        "ms_tree": tree,
        "ms_flat": flat,
        "ms_chain": chain,
        "flat_over_tree": flat / tree,
        "bound": pairs / own,
        "max_difference_of_float32": (output.float() - exact).abs().max().item(),
    }


def run(arguments: argparse.Namespace, ranks: Ranks, directory: Path) -> dict[str, Any]:
    repeats = 3 if arguments.quick else 10
    kernels = {name: attention(rows, repeats) for name, rows in batches(arguments.quick).items()}
    model = write_model(directory / "model", LARGE)
    bench = StepBench(Policy(model, settings(directory, arguments.precision), ranks), arguments.max_tokens, directory)
    whole = three_ways(bench, QUICK_WORKLOAD if arguments.quick else WORKLOAD, 1 if arguments.quick else 3)
    kernel = "magi_attention" if fits(torch.empty(1, WIDTH, dtype=torch.bfloat16)) else "flex_attention"
    return {"kernel": kernel, "attention": kernels, "peak_mb": peak_mb()} | whole


def main(arguments: Sequence[str] | None = None) -> int:
    command = parser(__doc__ or "")
    command.set_defaults(precision="bfloat16")
    options = command.parse_args(arguments)
    try:
        if not torch.cuda.is_available():
            raise UserError("torch sees no GPU on this machine; benchmarks/trainer.py measures steps on a CPU")
        be_single_process()
        figures = provenance("gpu.py")
        with tempfile.TemporaryDirectory() as directory, process_groups(Parallel()) as ranks:
            figures |= run(options, ranks, Path(directory))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    write_result(figures, options.out)
    return 0
