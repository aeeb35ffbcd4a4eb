"""The training loop.

A step: lease its groups, update the weights, make a durable checkpoint, publish (one transaction), push. Rollouts go on
meanwhile. Whenever a process dies, the next start goes on from the latest published version: what was leased but not
published is leased again unchanged, what was published but not pushed is pushed again. Left out: how weights are
updated and pushed (trainer/policy.py, trainer/push.py).
"""

import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from proxy.pool.errors import UserError
from proxy.pool.schedule import LeasedGroup
from proxy.pool.steps import Version
from trainer.batch import Batch, assemble, choice_of
from trainer.config import Config
from trainer.ledger import Ledger
from trainer.loss import policy_loss, read_sums
from trainer.megatron.optimizer import learning_rate
from trainer.megatron.parallel import Ranks
from trainer.packing import key_cost, plan
from trainer.policy import Policy, Update
from trainer.rows import Row
from trainer.rules import configured
from trainer.tree import distinct


def train(config: Config, ranks: Ranks) -> None:
    """Train until `config.steps` steps are published. Every rank runs this; the ledger is rank 0's alone."""
    ledger = Ledger(config, ranks)
    policy, rule = Policy(Path(config.model), config, ranks), partial(policy_loss, rule=configured(config.loss))
    step, per_key = resume(config, policy, ledger), key_cost(policy.shape)
    while step < config.steps:
        step += 1
        clock = Clock()
        groups = ledger.wait_for_lease(step).groups
        clock.lap("wait")
        batch = assemble(groups, choice_of(config, step))
        micros = plan(batch.rows, ranks.data_world, config.batch.max_tokens, per_key)
        rate = learning_rate(config.optimizer, step, config.steps)
        update = policy.update(micros[ranks.data_rank], batch.tokens, rule, rate)
        clock.lap("train")
        directories = save(config, policy, step)
        clock.lap("checkpoint")
        metrics = describe(update, batch, groups) | sizes(micros) | {"lr": rate, "seconds": clock.seconds}
        version = ledger.publish(step, directories, metrics)
        ledger.push(version)
        clock.lap("push")
        if ranks.rank == 0:
            print(line(version, metrics), flush=True)
            prune(config, step)


def resume(config: Config, policy: Policy, ledger: Ledger) -> int:
    """Bring policy, pool and engines to the latest published version, publishing the initial weights if there is none.

    Returns its step.
    """
    version = ledger.latest()
    if version is None:
        ledger.push(ledger.publish(0, save(config, policy, 0), {}))
        return 0
    step = policy.checkpoints.load(Path(version.checkpoint))
    if step != version.step:
        raise UserError(
            f"{version.checkpoint} is of step {step}, not {version.step} as the pool says; restore the checkpoint"
        )
    ledger.reopen_after(step)
    ledger.push(version)
    return step


def save(config: Config, policy: Policy, step: int) -> tuple[Path, Path]:
    """A durable checkpoint, and the same weights for the engines."""
    checkpoint, exported = (Path(config.output) / kind / f"step-{step:06d}" for kind in ("checkpoints", "models"))
    policy.checkpoints.save(checkpoint, step)
    policy.write_hf(exported)
    return checkpoint, exported


def prune(config: Config, step: int) -> None:
    """Delete the checkpoints and models that are older than the newest `checkpoint.keep`."""
    for kind in ("checkpoints", "models"):
        for path in (Path(config.output) / kind).glob("step-*"):
            if int(path.name.removeprefix("step-")) <= step - config.checkpoint.keep:
                shutil.rmtree(path)


def describe(update: Update, batch: Batch, groups: list[LeasedGroup]) -> dict[str, Any]:
    """The metrics of a step; those of the policy's tokens are absent when nothing could be learned."""
    staleness = [group.staleness for group in groups]
    learned = read_sums(update.sums) if update.sums else {}
    return learned | {
        "loss": update.loss,
        "grad_norm": update.grad_norm,
        "reward_mean": sum(batch.rewards) / max(1, len(batch.rewards)),
        "rollouts": sum(len(group.rollouts) for group in groups),
        "valid_rollouts": len(batch.rewards),
        "groups": len(groups),
        "dropped_groups": batch.dropped_groups,
        "sequences": len(batch.rows),
        "trained_tokens": batch.tokens,
        "excluded_tokens": dict(batch.excluded),
        "masked_tokens": dict(batch.masked),
        "unplaced_rewards": batch.unplaced_rewards,
        "staleness_mean": sum(staleness) / len(staleness),
        "staleness_max": max(staleness),
    }


def sizes(micros: Sequence[Sequence[Sequence[Row]]]) -> dict[str, int]:
    """What all ranks compute, in tokens: by trees, and what the same rows would be one by one."""
    return {
        "computed_tokens": sum(distinct(micro) for rank in micros for micro in rank),
        "flat_tokens": sum(row.inputs for rank in micros for micro in rank for row in micro),
    }


class Clock:
    """Seconds of each part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = round(now - self._last, 4)
        self._last = now


def line(version: Version, metrics: dict[str, Any]) -> str:
    """One step, for the terminal."""
    seconds = " ".join(f"{name} {value:.2f}s" for name, value in metrics["seconds"].items())
    return (
        f"step {version.step} {version.name}  reward {metrics['reward_mean']:.3f}  "
        f"groups {metrics['groups']} ({metrics['dropped_groups']} equal)  tokens {metrics['trained_tokens']}  "
        f"loss {metrics['loss']:.4f}  grad {metrics['grad_norm']:.3f}  clipped {metrics.get('clip_fraction', 0):.2%}  "
        f"stale {metrics['staleness_mean']:.1f}  {seconds}"
    )
