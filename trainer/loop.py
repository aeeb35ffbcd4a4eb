"""The training loop.

A step: lease its groups, update the weights, make a durable checkpoint, publish (one transaction), push. Rollouts go on
meanwhile. Whenever a process dies, the next start goes on from the latest published version: what was leased but not
published is leased again unchanged, what was published but not pushed is pushed again. Left out: how weights are
updated and pushed (trainer/policy.py, trainer/push).
"""

from functools import partial
from pathlib import Path

from proxy.pool.errors import UserError
from trainer.config import Config
from trainer.data.assemble import assemble, choice_of
from trainer.data.packing import key_cost, plan
from trainer.loss.named_losses import configured
from trainer.loss.policy_loss import policy_loss
from trainer.megatron import atomic_dir
from trainer.megatron.optimizer import learning_rate
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy
from trainer.preflight import demand_known_tokens
from trainer.report.describe import Clock, Facts
from trainer.report.reporter import Reporter
from trainer.report.token_gradients import Watched
from trainer.run_state import Ledger


def train(config: Config, ranks: Ranks) -> None:
    """Train until `config.steps` steps are published. Every rank runs this; the ledger is rank 0's alone."""
    ledger = Ledger(config, ranks)
    policy, rule = Policy(Path(config.model), config, ranks), partial(policy_loss, rule=configured(config.loss))
    step, per_key = resume(config, policy, ledger), key_cost(policy.shape)
    with Reporter(config, ledger, policy) as reporter:
        while step < config.steps:
            step += 1
            clock = Clock()
            groups = ledger.wait_for_lease(step).groups
            clock.lap("wait")
            batch = assemble(groups, choice_of(config, step, policy.mixture))
            demand_known_tokens(batch.rows, policy.shape, policy.source)
            micros = plan(batch.rows, ranks.data_world, config.batch.max_tokens, per_key)
            ledger.release_engines()
            measured = reporter.measure(step, policy, micros[ranks.data_rank], batch.tokens)
            clock.lap("prepare")
            rate, watched = learning_rate(config.optimizer, step, config.steps), Watched(rule)
            update = policy.update(micros[ranks.data_rank], batch.tokens, watched, rate)
            clock.lap("train")
            directories = save(config, policy, step)
            clock.lap("checkpoint")
            notes = watched.collect(micros, ranks, policy.share)
            facts = Facts(step, groups, batch, micros, update, notes, measured | {"lr": rate}, clock.seconds)
            metrics = reporter.describe(facts)
            clock.lap("report")
            version = ledger.publish(step, directories, metrics)
            ledger.push(version)
            clock.lap("push")
            reporter.tell(version, metrics | {"pause_seconds": ledger.pause_seconds, "seconds": clock.seconds})
            if ranks.rank == 0:
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
    """A durable checkpoint, and the same weights for the engines, written beside each other."""
    checkpoint, exported = (Path(config.output) / kind / f"step-{step:06d}" for kind in ("checkpoints", "models"))
    policy.checkpoints.save(checkpoint, step, meanwhile=lambda: policy.write_hf(exported))
    return checkpoint, exported


def prune(config: Config, step: int) -> None:
    """Delete the checkpoints and models that are older than the newest `checkpoint.keep`."""
    for kind in ("checkpoints", "models"):
        for path in (Path(config.output) / kind).glob("step-*"):
            number = path.name.removeprefix("step-")
            if number.isdecimal() and int(number) <= step - config.checkpoint.keep:  # else a copy of somebody's
                atomic_dir.remove(path)
