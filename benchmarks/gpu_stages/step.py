"""Stage 4: one train step of a model in the shape of Qwen3-1.7B, from the lease to exported weights, by parts.

The order and the functions are those of trainer/loop.py. The pool is a file of random rollouts. What is in `update` is
also timed by itself (benchmarks/steps.py), and by the device's kernels.
"""

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_stages.models import DENSE_SMALL, QWEN3_1_7B, make_config, write_model
from benchmarks.gpu_stages.scene import Scene, one_rank
from benchmarks.gpu_stages.stack import peak_of
from benchmarks.recorded import Workload, make_groups
from benchmarks.steps import TREE, PartTimer, StepBench
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.schema import completions
from proxy.pool.training.windowed_fifo import LeasedGroup
from trainer.config import Config
from trainer.config.batch import BatchConfig
from trainer.config.step import step_options
from trainer.data.assemble import assemble
from trainer.data.packing import key_cost, plan
from trainer.data.row import TrainingRow
from trainer.loop import save
from trainer.loss.named_losses import configured
from trainer.loss.policy_loss import policy_loss
from trainer.policy import LossFunction, Policy
from trainer.report.flops import flops, merged
from trainer.run_state import RunState

BATCH = Workload(groups=8, members=8, turns=6, prompt=2000, observed=200, sampled=200, vocabulary=151_936)
SMALL = Workload(groups=2, members=2, turns=2, prompt=32, observed=8, sampled=8)
KERNELS = 20
"""Kernels that are named."""
DISK_BYTES = 40 * 10**9
"""Checkpoint and exported model take 28 GB."""


def figures(scene: Scene) -> Iterator[dict[str, Any]]:
    sizes, play = (DENSE_SMALL, SMALL) if scene.small else (QWEN3_1_7B, BATCH)
    laps = PartTimer()
    model = write_model(scene, sizes)
    config = make_config(scene, model, recompute=True)  # 28 layers of 32,768 tokens are more than a GPU holds
    config = msgspec.structs.replace(config, batch=BatchConfig(groups=play.groups))
    laps.lap("write_inputs")
    with one_rank() as ranks, RunState(config, ranks) as run:
        run.publish(0, (model, model), {})  # the rollouts are of this version
        fill(run.pool, run.pool_run.id, make_groups(play))
        laps.lap("fill_pool")
        policy = Policy(model, config, ranks)
        laps.lap("load")
        for parts in step(scene, laps, config, policy, run):
            yield {"seconds_by_part": laps.seconds} | parts
        yield {"update": scene.tried(lambda: update_by_parts(scene, policy, play))}
        # Last, as it waits for the disk: a stage that takes too long has all other figures.
        yield {"seconds_by_part": laps.seconds} | publish(scene, laps, config, policy, run)


def fill(pool: Pool, run_id: int, groups: list[LeasedGroup]) -> None:
    """Write these groups into the pool as harness and proxy do: finished, with rewards."""
    for group in groups:
        members = open_group(pool, run_id, group.task, len(group.rollouts))
        for member, rollout in zip(members, group.rollouts, strict=True):
            attempt, _ = open_attempt(pool, member.rollout_id, "command")
            store(pool, attempt.id, rollout.completions)
            finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=rollout.reward))


def store(pool: Pool, attempt_id: int, chain: list[Completion]) -> None:
    """Store the completions of an attempt, each against the one before."""
    before = None
    with pool.write() as connection:
        for item in chain:
            row = to_row(item) | {"attempt_id": attempt_id, "ordinal": item.ordinal, "prefix_of": before}
            before = insert_row(connection, completions, row)


def step(scene: Scene, laps: PartTimer, config: Config, policy: Policy, run: RunState) -> Iterator[dict[str, Any]]:
    """The step itself. Yields what is known after each part."""
    leased = run.wait_for_lease(1).groups
    laps.lap("lease")
    batch = assemble(leased, step_options(config, 1, policy.mixture))
    laps.lap("assemble")
    micros = plan(batch.rows, 1, config.batch.max_tokens, key_cost(policy.shape))[0]
    laps.lap("plan")
    work = merged(batch.rows)
    yield {"tokens": work.tokens, "trained_tokens": batch.tokens, "micro_batches": len(micros)}
    loss = partial(policy_loss, rule=configured(config.loss))
    for name in ("update_first", "update"):  # the first one compiles
        laps.lap("between")
        peak = scene.peak_bytes(partial(policy.update, micros, batch.tokens, loss, 1e-6))
        laps.lap(name)
    seconds, top = laps.seconds["update"], peak_of(scene)
    yield {
        "update_peak_bytes": peak,
        "update_tokens_per_s": work.tokens / seconds,
        "update_mfu": None if top is None else flops(policy.shape, work) / seconds / top,
    }
    yield {"kernels": scene.tried(lambda: kernels(policy, micros[0], batch.tokens, loss))}


def kernels(policy: Policy, rows: list[TrainingRow], tokens: int, loss: LossFunction) -> dict[str, Any]:
    """Where the time of a micro-batch and the optimizer's step goes: the dearest kernels' share of the device's time.

    `busy`: the device's time over the clock's. On a CPU the operations take the kernels' place.
    """
    on = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
    began = time.perf_counter()
    with profile(activities=[on]) as profiler:
        policy.update([rows], tokens, loss, 1e-6)
    seconds = time.perf_counter() - began
    kind = "device" if on is ProfilerActivity.CUDA else "cpu"
    micros = Counter[str]()
    for event in profiler.key_averages():
        micros[event.key[:100]] += getattr(event, f"self_{kind}_time_total")  # names of templates have thousands
    total = micros.total()
    return {"busy": total / 1e6 / seconds, "share": {name: part / total for name, part in micros.most_common(KERNELS)}}


def publish(scene: Scene, laps: PartTimer, config: Config, policy: Policy, run: RunState) -> dict[str, Any]:
    """Save checkpoint and exported weights, and publish them."""
    free = shutil.disk_usage(scene.directory).free
    if not scene.small and free < DISK_BYTES:
        scene.lacking.append(f"{free / 1e9:.0f} GB are free on the disk, and checkpoint and model take 28 GB")
        return {"save_lacks": scene.lacking[-1]}
    laps.lap("between")
    directories = save(config, policy, 1)
    laps.lap("save")
    run.publish(1, directories, {}, parent=run.latest())
    laps.lap("publish")
    laps.seconds.pop("between")
    return {"checkpoint_bytes": size_of(directories[0]), "export_bytes": size_of(directories[1])}


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def update_by_parts(scene: Scene, policy: Policy, play: Workload) -> dict[str, Any]:
    """Packing, passes and optimizer apart."""
    bench = StepBench(policy, BatchConfig().max_tokens, scene.directory)
    return {"seconds": bench.learn(play, TREE)[0].seconds}
