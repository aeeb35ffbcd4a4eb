"""Measure what a training step costs, part by part: one JSON object as the last line of output, and in the file of
--out.

The parts are those of the training loop from the leased groups to the exported model: assemble (credit, rows), pack
(trees, micro-batches, tensors), forward and backward, optimizer, checkpoint, export. The same batch is computed in
three ways: `flat` computes each completion by itself, `rows` each of the loop's sequences, `tree` every distinct token
once. Uses the GPU if there is one. docs/trees.md explains each figure. Left out: waiting for rollouts, the pool,
engines.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks import result
from benchmarks.recorded import Workload, make_groups
from benchmarks.trees import FLAT_TOKENS, NARROW, RULE, WIDE, fill_micro_batches, saved_bytes, work, write_model
from trainer.config import Config, Parallel
from trainer.config.step import StepOptions
from trainer.data.assemble import TrainingBatch, assemble
from trainer.data.packing import pack, plan
from trainer.data.tree import distinct
from trainer.loss.policy_loss import LossSums, policy_loss
from trainer.megatron.optimizer import set_learning_rate, sum_gradients
from trainer.megatron.parallel import Ranks, process_groups
from trainer.megatron.schedule import forward_backward
from trainer.policy import Policy

STEP = Workload(groups=2, members=4, turns=4, prompt=512, observed=64, sampled=64)
LONG = Workload(groups=16, members=8, turns=6, prompt=2000, observed=130, sampled=130)
"""About 200,000 distinct tokens."""
QUICK = Workload(groups=1, members=2, turns=2, prompt=32, observed=8, sampled=8)
PARTS = ("assemble", "pack", "forward_backward", "optimizer", "checkpoint", "export")


@dataclass(frozen=True)
class StepVariant:
    """How a batch is computed."""

    name: str
    separate: bool
    merge: bool


FLAT, ROWS, TREE = StepVariant("flat", True, False), StepVariant("rows", False, False), StepVariant("tree", False, True)


class PartTimer:
    """Seconds of each part of a step, with the GPU's work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """End a part: the time since the last call is its own."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


@dataclass(frozen=True)
class StepBench:
    """The policy that a step is measured with, its token budget, and where it writes."""

    policy: Policy
    budget: int
    directory: Path

    def step(self, play: Workload, way: StepVariant) -> tuple[dict[str, float], TrainingBatch]:
        """Run one step; returns its seconds by part, and its batch."""
        laps, batch = self.learn(play, way)
        at = self.directory / str(time.monotonic_ns())
        self.policy.checkpoints.save(at / "checkpoint", 1)
        laps.lap("checkpoint")
        self.policy.write_hf(at / "model")
        laps.lap("export")
        return laps.seconds, batch

    def learn(self, play: Workload, way: StepVariant) -> tuple[PartTimer, TrainingBatch]:
        """Run the parts of a step up to the optimizer's; returns their times, and the batch."""
        groups = make_groups(play, way.separate)
        laps = PartTimer()
        batch = assemble(groups, StepOptions())
        laps.lap("assemble")
        micros = plan(batch.rows, 1, self.budget)[0] if way.merge else fill_micro_batches(batch.rows, FLAT_TOKENS)
        parts = [pack(rows, self.policy.shard, way.merge) for rows in micros]
        laps.lap("pack")

        def loss(number: int, edges: Tensor) -> tuple[Tensor, LossSums]:
            packed, tokens = parts[number]
            total, sums = policy_loss(edges[packed.branches], tokens, RULE)
            return total / batch.tokens, sums

        self.policy.ddp.zero_grad_buffer()
        self.policy.optimizer.zero_grad()
        forward_backward(self.policy.ddp, [packed for packed, _ in parts], loss)
        laps.lap("forward_backward")
        sum_gradients(self.policy.ddp)
        set_learning_rate(self.policy.optimizer, 1e-6)
        self.policy.optimizer.step()
        laps.lap("optimizer")
        return laps, batch

    def measured(self, play: Workload, ways: Sequence[StepVariant], repeats: int) -> list[dict[str, Any]]:
        """Medians of some steps after a warm-up. The variants alternate, so that other load meets all of them."""
        for way in ways:
            self.step(play, way)
        rounds = [[self.step(play, way) for way in ways] for _ in range(repeats)]
        return [self._medians(play, way, runs) for way, runs in zip(ways, zip(*rounds, strict=True), strict=True)]

    def _medians(
        self, play: Workload, way: StepVariant, runs: Sequence[tuple[dict[str, float], TrainingBatch]]
    ) -> dict[str, Any]:
        batch = runs[-1][1]
        seconds = {part: median(run[part] for run, _ in runs) for part in PARTS}
        whole = sum(seconds.values())
        flat = sum(row.inputs for row in assemble(make_groups(play, separate=True), StepOptions()).rows)
        return {
            "seconds": seconds,
            "seconds_step": whole,
            "computed_tokens": work(batch.rows, way.merge).tokens,
            "trained_tokens": batch.tokens,
            "flat_tokens_per_s": flat / whole,
            "share_of_packing": (seconds["assemble"] + seconds["pack"]) / whole,
        }


def three_ways(bench: StepBench, play: Workload, repeats: int) -> dict[str, Any]:
    """The ratios between the three variants, and the figures behind them."""
    flat, rows, tree = bench.measured(play, (FLAT, ROWS, TREE), repeats)
    print([round(one["seconds_step"], 2) for one in (flat, rows, tree)], file=sys.stderr, flush=True)
    batch = assemble(make_groups(play), StepOptions()).rows
    separate = assemble(make_groups(play, separate=True), StepOptions()).rows
    saved = [saved_bytes(bench.policy, *arguments) for arguments in ((separate, False), (batch, False), (batch, True))]
    learn_seconds = [one["seconds"]["forward_backward"] for one in (flat, rows, tree)]
    return {
        "step_flat_over_tree": flat["seconds_step"] / tree["seconds_step"],
        "step_rows_over_tree": rows["seconds_step"] / tree["seconds_step"],
        "learn_flat_over_tree": learn_seconds[0] / learn_seconds[2],
        "learn_rows_over_tree": learn_seconds[1] / learn_seconds[2],
        "flat_tokens_per_s": tree["flat_tokens_per_s"],
        "memory_flat_over_tree": saved[0] / saved[2],
        "memory_rows_over_tree": saved[1] / saved[2],
        "cases": {"flat": flat, "rows": rows, "tree": tree},
    }


def long_step(bench: StepBench, play: Workload) -> dict[str, Any]:
    """Measure one step of many tokens by trees: the share of packing in it."""
    seconds, batch = bench.step(play, TREE)
    packing = seconds["assemble"] + seconds["pack"]
    tokens = distinct(batch.rows)
    return {
        "long_tokens": tokens,
        "long_seconds": seconds,
        "packing_share_long": packing / sum(seconds.values()),
        "tree_share_long": seconds["pack"] / sum(seconds.values()),
        "pack_tokens_per_s": tokens / seconds["pack"],
    }


def provenance(script: str) -> dict[str, Any]:
    """When, where and how; and what `flat` means."""
    return result.provenance(script) | {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "flat_is": "each completion by itself; rows: each sequence of the loop by itself, histories already joined",
    }


def peak_mb() -> float:
    """Peak memory in MiB: of the GPU, or of the process on a machine without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def settings(directory: Path, precision: Literal["float32", "bfloat16"]) -> Config:
    """A configuration for this model directory."""
    pool, here, parallel = str(directory / "pool.db"), str(directory), Parallel(precision=precision)
    return Config(pool=pool, run="benchmark", model=here, output=here, parallel=parallel)


def run(arguments: argparse.Namespace, ranks: Ranks, directory: Path) -> dict[str, Any]:
    def bench(sizes: Any) -> StepBench:
        model = write_model(directory / str(sizes.hidden), sizes)
        return StepBench(
            Policy(model, settings(directory, arguments.precision), ranks), arguments.max_tokens, directory
        )

    quick = arguments.quick
    narrow = bench(NARROW)
    figures = three_ways(narrow if quick else bench(WIDE), QUICK if quick else STEP, 1 if quick else 3)
    figures["play"], figures["sizes"] = asdict(QUICK if quick else STEP), asdict(NARROW if quick else WIDE)
    narrow.step(QUICK, TREE)  # warm up
    return figures | long_step(narrow, QUICK if quick else LONG) | {"peak_mb": peak_mb()}


def parser(text: str) -> argparse.ArgumentParser:
    """The command-line options that the benchmarks of steps share."""
    command = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    command.add_argument("--quick", action="store_true", help="seconds instead of minutes; the figures mean little")
    command.add_argument(
        "--max-tokens", type=int, default=32_768, help="tokens in a micro-batch of trees (%(default)s)"
    )
    command.add_argument("--precision", default="float32", help="float32 or bfloat16 (%(default)s)")
    command.add_argument("--out", type=Path, help="also write the object to this file")
    return command


def main(arguments: Sequence[str] | None = None) -> int:
    command = parser(__doc__ or "")
    command.add_argument("--threads", type=int, default=1, help="threads of the computation (%(default)s)")
    options = command.parse_args(arguments)
    torch.set_num_threads(options.threads)
    result.be_single_process()
    figures = provenance("trainer.py")
    with tempfile.TemporaryDirectory() as directory, process_groups(Parallel()) as ranks:
        figures |= run(options, ranks, Path(directory))
    result.write_result(figures, options.out)
    return 0
