"""What a train step costs, part by part: one JSON object as the last line of output, and in the file that --out names.

The parts are those of the training loop from the leased groups to the exported model: assemble (credit, rows), pack
(trees, micro-batches, tensors), forward and backward, optimizer, checkpoint, export. The same batch three ways in one
run: `flat` computes each completion by itself, `rows` each of the loop's sequences, `tree` every distinct token once.
On a machine with a GPU it is used. docs/trees.md says what each figure is. Left out: waiting for rollouts, the pool,
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
from typing import Any

import torch
from torch import Tensor

from benchmarks import said
from benchmarks.recorded import Play, leased
from benchmarks.trees import FLAT_TOKENS, NARROW, RULE, WIDE, filled, saved_bytes, work, write_model
from trainer.config import Config, Parallel
from trainer.data.assemble import Batch, Choice, assemble
from trainer.data.packing import pack, plan
from trainer.data.tree import distinct
from trainer.loss.policy_loss import LossSums, policy_loss
from trainer.megatron.optimizer import set_learning_rate, sum_gradients
from trainer.megatron.parallel import Ranks, process_groups
from trainer.megatron.schedule import forward_backward
from trainer.policy import Policy

STEP = Play(groups=2, members=4, turns=4, prompt=512, observed=64, sampled=64)
LONG = Play(groups=16, members=8, turns=6, prompt=2000, observed=130, sampled=130)
"""About 200,000 distinct tokens."""
QUICK = Play(groups=1, members=2, turns=2, prompt=32, observed=8, sampled=8)
PARTS = ("assemble", "pack", "forward_backward", "optimizer", "checkpoint", "export")


@dataclass(frozen=True)
class Way:
    """How a batch is computed."""

    name: str
    separate: bool
    merge: bool


FLAT, ROWS, TREE = Way("flat", True, False), Way("rows", False, False), Way("tree", False, True)


class Laps:
    """Seconds of each part, the GPU's work included."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


@dataclass(frozen=True)
class Bench:
    """What a step is measured with."""

    policy: Policy
    budget: int
    directory: Path

    def step(self, play: Play, way: Way) -> tuple[dict[str, float], Batch]:
        """One step, its seconds by parts, and its batch."""
        groups = leased(play, way.separate)
        laps = Laps()
        batch = assemble(groups, Choice())
        laps.lap("assemble")
        micros = plan(batch.rows, 1, self.budget)[0] if way.merge else filled(batch.rows, FLAT_TOKENS)
        parts = [pack(rows, self.policy.share, way.merge) for rows in micros]
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
        at = self.directory / str(time.monotonic_ns())
        self.policy.checkpoints.save(at / "checkpoint", 1)
        laps.lap("checkpoint")
        self.policy.write_hf(at / "model")
        laps.lap("export")
        return laps.seconds, batch

    def measured(self, play: Play, ways: Sequence[Way], repeats: int) -> list[dict[str, Any]]:
        """Medians of some steps after one that warms up. The ways take turns: other work then meets all of them."""
        for way in ways:
            self.step(play, way)
        rounds = [[self.step(play, way) for way in ways] for _ in range(repeats)]
        return [self._medians(play, way, runs) for way, runs in zip(ways, zip(*rounds, strict=True), strict=True)]

    def _medians(self, play: Play, way: Way, runs: Sequence[tuple[dict[str, float], Batch]]) -> dict[str, Any]:
        batch = runs[-1][1]
        seconds = {part: median(run[part] for run, _ in runs) for part in PARTS}
        whole = sum(seconds.values())
        flat = sum(row.inputs for row in assemble(leased(play, separate=True), Choice()).rows)
        return {
            "seconds": seconds,
            "seconds_step": whole,
            "computed_tokens": work(batch.rows, way.merge).tokens,
            "trained_tokens": batch.tokens,
            "flat_tokens_per_s": flat / whole,
            "share_of_packing": (seconds["assemble"] + seconds["pack"]) / whole,
        }


def three_ways(bench: Bench, play: Play, repeats: int) -> dict[str, Any]:
    """The ratios and what they are of."""
    flat, rows, tree = bench.measured(play, (FLAT, ROWS, TREE), repeats)
    print([round(one["seconds_step"], 2) for one in (flat, rows, tree)], file=sys.stderr, flush=True)
    batch = assemble(leased(play), Choice()).rows
    separate = assemble(leased(play, separate=True), Choice()).rows
    kept = [saved_bytes(bench.policy, *given) for given in ((separate, False), (batch, False), (batch, True))]
    learned = [one["seconds"]["forward_backward"] for one in (flat, rows, tree)]
    return {
        "step_flat_over_tree": flat["seconds_step"] / tree["seconds_step"],
        "step_rows_over_tree": rows["seconds_step"] / tree["seconds_step"],
        "learn_flat_over_tree": learned[0] / learned[2],
        "learn_rows_over_tree": learned[1] / learned[2],
        "flat_tokens_per_s": tree["flat_tokens_per_s"],
        "memory_flat_over_tree": kept[0] / kept[2],
        "memory_rows_over_tree": kept[1] / kept[2],
        "cases": {"flat": flat, "rows": rows, "tree": tree},
    }


def long_step(bench: Bench, play: Play) -> dict[str, Any]:
    """One step of many tokens by trees: what packing is of it."""
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


def facts(script: str) -> dict[str, Any]:
    """When, where and how; and what `flat` means."""
    return said.facts(script) | {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "flat_is": "each completion by itself; rows: each sequence of the loop by itself, histories already joined",
    }


def peak_mb() -> float:
    """Of the device, or of the process on a machine without one."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def settings(directory: Path, precision: str) -> Config:
    pool, here, parallel = str(directory / "pool.db"), str(directory), Parallel(precision=precision)
    return Config(pool=pool, run="benchmark", model=here, output=here, parallel=parallel)


def run(given: argparse.Namespace, ranks: Ranks, directory: Path) -> dict[str, Any]:
    def bench(sizes: Any) -> Bench:
        model = write_model(directory / str(sizes.hidden), sizes)
        return Bench(Policy(model, settings(directory, given.precision), ranks), given.max_tokens, directory)

    quick = given.quick
    narrow = bench(NARROW)
    found = three_ways(narrow if quick else bench(WIDE), QUICK if quick else STEP, 1 if quick else 3)
    found["play"], found["sizes"] = asdict(QUICK if quick else STEP), asdict(NARROW if quick else WIDE)
    narrow.step(QUICK, TREE)  # the first call of everything
    return found | long_step(narrow, QUICK if quick else LONG) | {"peak_mb": peak_mb()}


def parser(text: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="seconds in place of minutes; the figures mean little")
    made.add_argument("--max-tokens", type=int, default=32_768, help="of a micro-batch of trees (%(default)s)")
    made.add_argument("--precision", default="float32", help="float32 or bfloat16 (%(default)s)")
    made.add_argument("--out", type=Path, help="also write the object here")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    command = parser(__doc__ or "")
    command.add_argument("--threads", type=int, default=1, help="of the computation (%(default)s)")
    given = command.parse_args(arguments)
    torch.set_num_threads(given.threads)
    said.alone()
    found = facts("trainer.py")
    with tempfile.TemporaryDirectory() as directory, process_groups(Parallel()) as ranks:
        found |= run(given, ranks, Path(directory))
    said.say(found, given.out)
    return 0
