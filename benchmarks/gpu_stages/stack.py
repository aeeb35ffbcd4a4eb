"""Stage 2: layers of Qwen3-4B in bf16, by trees, by sequences and one completion at a time, in benchmarks/tree.py's
five cases.

A few layers are measured; the difference between two depths is a layer's time, from which the whole model's follows.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_stages.models import DENSE_SMALL, QWEN3_4B, make_policy, write_model
from benchmarks.gpu_stages.scene import Scene, one_rank
from benchmarks.trees import cases, fill_micro_batches, forward_backward
from trainer.config.model_shape import ModelShape
from trainer.data.packing import plan
from trainer.data.row import TrainingRow
from trainer.policy import Policy
from trainer.report.flops import PEAKS, Workload, flops, merged, separate

DEPTHS = (1, 3)
"""Layers that are measured."""
BUDGET = 32_768
"""Tokens of a micro-batch."""
WAYS = ("flat", "rows", "tree")
Seconds = dict[str, dict[str, float]]


def figures(scene: Scene) -> Iterator[dict[str, Any]]:
    sizes = DENSE_SMALL if scene.small else QWEN3_4B
    depths = (1, 2) if scene.small else DEPTHS
    yield {"layers": sizes.layers, "measured_layers": depths}
    measured: list[Seconds] = []
    with one_rank() as ranks:
        for depth in depths:
            policy = make_policy(scene, ranks, write_model(scene, sizes.with_layers(depth)))
            measured.append({})
            for name, seconds in every_case(scene, policy):
                measured[-1][name] = seconds
                yield {"seconds_by_depth": dict(zip(map(str, depths), measured, strict=False))}
            shape = replace(policy.shape, layers=sizes.layers)
            del policy
            scene.free()
    yield {"cases": report(scene, shape, depths, measured)}


def every_case(scene: Scene, policy: Policy) -> Iterator[tuple[str, dict[str, float]]]:
    """The seconds of each way, case by case."""
    for number, case in enumerate(cases(scene.small)):
        rows = case.rows()
        if not number:
            for way in WAYS:
                seconds_of(scene, policy, rows, way)  # warm up: kernels are compiled, memory is taken
        yield case.name, scene.tried(partial(three_ways, scene, policy, rows))


def three_ways(scene: Scene, policy: Policy, rows: Sequence[TrainingRow]) -> dict[str, float]:
    """The best seconds of each way."""
    return {way: min(seconds_of(scene, policy, rows, way) for _ in range(repeats(way))) for way in WAYS}


def repeats(way: str) -> int:
    return 1 if way == "flat" else 3  # one by one, the longest case is a million tokens


def seconds_of(scene: Scene, policy: Policy, rows: Sequence[TrainingRow], way: str) -> float:
    """Forward and backward passes of a batch, with packing."""
    merge, batch = way == "tree", list(rows) if way == "flat" else joined(rows)
    micros = plan(batch, 1, BUDGET)[0] if merge else fill_micro_batches(batch, BUDGET)
    scene.synchronize()
    began = time.perf_counter()
    forward_backward(policy, micros, merge)
    scene.synchronize()
    return time.perf_counter() - began


def joined(rows: Sequence[TrainingRow]) -> list[TrainingRow]:
    """The loop's sequences: a row that a later one continues is a part of it (trainer/data/assemble.py)."""
    sequences: list[TrainingRow] = []
    for row in rows:
        before = sequences[-1] if sequences else None
        size = 0 if before is None else len(before.tokens)
        if before is None or size >= len(row.tokens) or not np.array_equal(before.tokens, row.tokens[:size]):
            sequences.append(row)
            continue
        parts = ("trained", "rollout_logp", "advantage", "segment")
        values = {part: getattr(row, part).copy() for part in parts}
        for part, all_of_it in values.items():
            all_of_it[:size] = getattr(before, part)
        values["segment"][size:] += 1 + int(before.segment.max())
        sequences[-1] = replace(row, **values)
    return sequences


def work(rows: Sequence[TrainingRow], way: str) -> Workload:
    """What the batch takes in this way."""
    if way == "tree":
        return merged(joined(rows))
    batch = rows if way == "flat" else joined(rows)
    return separate([row.inputs for row in batch], sum(int(row.trained.sum()) for row in batch))


def report(scene: Scene, shape: ModelShape, depths: Sequence[int], measured: Sequence[Seconds]) -> dict[str, Any]:
    """By case: what trees gain and could gain, and each way's figures for a model of all layers.

    A case has no times where the deeper model took no longer than the shallow one: noise was larger than a layer.
    """
    gains, peak = dict[str, Any](), peak_of(scene)
    for case in cases(scene.small):
        if any(one[case.name].keys() & {"error", "lacks"} for one in measured):
            continue
        rows = case.rows()
        works = {way: work(rows, way) for way in WAYS}
        costs = {way: flops(shape, works[way]) for way in WAYS}
        gains[case.name] = {
            "flat_bound": costs["flat"] / costs["tree"],
            "rows_bound": costs["rows"] / costs["tree"],
            "tokens": {way: works[way].tokens for way in WAYS},
        }
        shallow, deep = (one[case.name] for one in measured)
        noisy = [way for way in WAYS if deep[way] <= shallow[way]]
        if noisy:
            gains[case.name]["unmeasured"] = f"{', '.join(noisy)}: {depths[1]} layers took no longer than {depths[0]}"
            continue
        layers_below = (shape.layers - depths[1]) / (depths[1] - depths[0])
        seconds = {way: deep[way] + layers_below * (deep[way] - shallow[way]) for way in WAYS}
        gains[case.name] |= {
            "flat_over_tree": seconds["flat"] / seconds["tree"],
            "rows_over_tree": seconds["rows"] / seconds["tree"],
            "seconds": seconds,
            "tokens_per_s": {way: works[way].tokens / seconds[way] for way in WAYS},
            "flat_tokens_per_s_by_tree": works["flat"].tokens / seconds["tree"],
            "mfu": {way: None if peak is None else costs[way] / seconds[way] / peak for way in WAYS},
        }
    return gains


def peak_of(scene: Scene) -> float | None:
    """FLOPs per second of the device in bf16, from its data sheet; None where it is not known."""
    return PEAKS.get(torch.cuda.get_device_name()) if scene.gpu else None
