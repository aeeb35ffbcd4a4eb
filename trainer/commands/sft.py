"""`trainer sft`, a supervised warm start: imitate recorded rollouts and write the result as a model directory.

Only sampled tokens are learned, each in its recorded context. `sft.min_reward` selects the rollouts; without it a
careless teacher is imitated as it is. Not here: checkpoints within the warm start, which takes minutes.
"""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.training.imitation import keep_imitated
from trainer import config as settings
from trainer.commands.recorded_rows import demonstrations
from trainer.data.assemble import trained_tokens
from trainer.data.imitation import imitated_tokens
from trainer.data.packing import pack, plan
from trainer.data.row import TrainingRow
from trainer.loss.policy_loss import imitation
from trainer.megatron.optimizer import learning_rate
from trainer.megatron.parallel import Ranks, sum_over_context_ranks
from trainer.policy import Policy
from trainer.preflight import demand_known_tokens


def warm_start(config: settings.Config, ranks: Ranks) -> dict[str, Any]:
    """Train on the recorded rollouts until a criterion of [sft] is met, write `sft.output`, return the last measures.

    Every rank runs this. Raises UserError when [sft] is incomplete or there is too little to imitate.
    """
    ranks.share(lambda: check(config))
    options = config.sft
    optimizer = msgspec.structs.replace(config.optimizer, lr=options.lr, warmup_steps=options.WARMUP_STEPS)
    loss = msgspec.structs.replace(
        config.loss, kl=0.0, kl_model="", kl_steps_ago=0, routing="own"
    )  # imitation uses neither
    whole = msgspec.structs.replace(config, optimizer=optimizer, loss=loss)
    policy = Policy(Path(config.model), whole, ranks)
    with ranks.shown("reading what is imitated"):
        train, held_out = split(ranks.share(lambda: demonstrations(config)), options)
    demand_known_tokens((*train, *held_out), policy.shape, policy.source)
    started = time.perf_counter()
    measures, learned = imitate(policy, whole, train, held_out)
    with ranks.shown(f"writing {options.output}"):
        policy.write_hf(Path(options.output).resolve())
    ranks.share(lambda: keep_imitated(open_pool(config.pool), learned))
    return measures | {"seconds": time.perf_counter() - started, "rows": len(train), "held_out_rows": len(held_out)}


def imitate(
    policy: Policy, config: settings.Config, train: Sequence[TrainingRow], held_out: Sequence[TrainingRow]
) -> tuple[dict[str, Any], dict[int, int]]:
    """Train until a criterion of [sft] is met; return the last measures, and by completion the tokens imitated.

    Shows how many of `sft.max_steps` are done; `sft.stop_loss` may end it before that.
    """
    options, ranks, started = config.sft, policy.ranks, time.perf_counter()
    measures, learned = dict[str, Any](), dict[int, int]()
    with ranks.shown("imitating", options.max_steps, "steps") as advance:
        for step, rows in enumerate(batches(train, options.batch, options.SEED), 1):
            learned |= imitated_tokens(rows)
            micros = plan(rows, ranks.data_world, config.batch.max_tokens)[ranks.data_rank]
            rate = learning_rate(config.optimizer, step, options.max_steps)
            update = policy.update(micros, trained_tokens(rows), imitation, rate)
            advance(1)
            if step % options.MEASURE_EVERY == 0 or step == options.max_steps:
                measures = {"step": step, "train_loss": update.loss}
                measures |= measure(policy, held_out, config.batch.max_tokens)
                if ranks.rank == 0:
                    print(
                        f"sft step {step}  loss {update.loss:.4f}  held-out loss {measures['loss']:.4f}  "
                        f"accuracy {measures['accuracy']:.3f}  {time.perf_counter() - started:.1f}s",
                        flush=True,
                    )
                if step == options.max_steps or enough(measures, options):
                    break
    return measures, learned


def check(config: settings.Config) -> None:
    """Raise UserError when [sft] lacks what a warm start needs, or the result would replace what must not be lost."""
    options, lowest = config.sft, config.optimizer.min_lr
    if not options.output or not options.runs:
        raise UserError(
            f"sft.runs = {list(options.runs)} must name the runs to imitate and sft.output = {options.output!r} "
            "the model directory to write; set both"
        )
    if options.lr < lowest:
        raise UserError(
            f"sft.lr = {options.lr} is below optimizer.min_lr = {lowest}, to which it would fall; raise the one, or "
            "lower the other"
        )
    demand_replaceable(config)


def demand_replaceable(config: settings.Config) -> None:
    """Raise UserError where `sft.output` is neither absent, empty, nor a model of its own."""
    target, model, output = (Path(path).resolve() for path in (config.sft.output, config.model, config.output))
    if target in (model, output) or target.is_relative_to(output / "models"):
        raise UserError(
            f"sft.output = {config.sft.output} is the run's model, its output or one of its models, which the warm "
            "start would replace; name another directory"
        )
    if not replaceable(target):
        raise UserError(
            f"sft.output = {config.sft.output} exists, and is not a model alone, which the warm start could replace "
            "(config.json, *.safetensors and no folders); move it, or name another directory"
        )


def replaceable(target: Path) -> bool:
    """Whether a path is absent, an empty directory, or one with a model and no folders."""
    if not target.is_dir():
        return not target.exists()
    paths = list(target.iterdir())
    model = (target / "config.json").is_file() and any(target.glob("*.safetensors"))
    return not paths or (model and not any(path.is_dir() for path in paths))


def split(
    groups: Sequence[Sequence[TrainingRow]], options: settings.Sft
) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Divide groups into rows to train on and rows held out. A group, and so its task, is on one side only."""
    order = list(range(len(groups)))
    random.Random(options.SEED).shuffle(order)
    held_out = min(max(1, round(len(order) * options.HELD_OUT)), len(order) - 1)  # at least one group on each side
    chosen = set(order[:held_out])
    train = [row for index, rows in enumerate(groups) if index not in chosen for row in rows]
    return train, [row for index in sorted(chosen) for row in groups[index]]


def batches(rows: Sequence[TrainingRow], size: int, seed: int) -> Iterator[list[TrainingRow]]:
    """Yield batches without end. Each epoch has its own order; its last batch may be smaller."""
    generator = random.Random(seed)
    while True:
        order = list(rows)
        generator.shuffle(order)
        yield from (order[start : start + size] for start in range(0, len(order), size))


def measure(policy: Policy, rows: Sequence[TrainingRow], max_tokens: int) -> dict[str, float]:
    """Return the held-out loss per token, and as accuracy the share of tokens that are the model's first choice.

    Every data rank computes all of it.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=policy.ranks.device)
    for micro in plan(rows, 1, max_tokens)[0]:
        packed, _ = pack(micro, policy.shard)
        correct = packed.labels[packed.branches] == policy.best(packed)
        sums += torch.stack((-policy.logprobs(packed).double().sum(), correct.sum()))
    loss, accuracy = (sum_over_context_ranks(sums) / trained_tokens(rows)).tolist()
    # All ranks take rank 0's figures: kernels may round differently elsewhere, and all ranks must stop together.
    return policy.ranks.share(lambda: {"loss": loss, "accuracy": accuracy})


def enough(measures: dict[str, Any], options: settings.Sft) -> bool:
    """Say whether the held-out loss is low enough to stop."""
    return options.stop_loss is not None and measures["loss"] <= options.stop_loss
