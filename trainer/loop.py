"""The training loop: lease, assemble, pack, update, save, publish, push.

The harness keeps sampling meanwhile. The order makes every kill harmless: the checkpoint is durable before one
transaction publishes the step, and the push comes last and may be repeated. So the next start resumes from the latest
published version: groups that were leased but not published are leased again unchanged, a version that was published
but not pushed is pushed again. Not here: how weights are updated and pushed (trainer/policy.py, trainer/push) and what
a step reports about itself (trainer/report).
"""

from functools import partial
from pathlib import Path

from proxy.pool.errors import UserError
from proxy.pool.training.steps import Version
from trainer.config import Config
from trainer.config.step import step_options
from trainer.data.assemble import assemble, trained_tokens
from trainer.data.imitation import denominator, mixed
from trainer.data.minibatches import orders
from trainer.data.packing import group_cost, key_cost, plan
from trainer.loss.named_losses import configured
from trainer.loss.policy_loss import policy_loss
from trainer.megatron import atomic_dir
from trainer.megatron.optimizer import learning_rate
from trainer.megatron.parallel import Ranks
from trainer.policy import GradientNotFinite, Minibatch, Policy
from trainer.preflight import demand_known_tokens
from trainer.report.reporter import Reporter, StepReport
from trainer.run_state import RunState
from trainer.step_files import checkpoint, exported, reference

BATCHES = 3
"""Batches in a row whose gradients may be not finite before the run ends: more have a cause that is not in the data."""


def train(config: Config, ranks: Ranks) -> None:
    """Train until `config.steps` steps are published. Every rank runs this; only rank 0 touches the pool.

    Raises UserError for what the user has to repair, for example engines that refuse a push; resuming is then safe.
    """
    with RunState(config, ranks) as run:
        run.release_engines()  # the policy needs their memory from here on
        policy = Policy(Path(config.model), config, ranks)
        version = resume(config, policy, run)
        with Reporter(config, run, policy) as reporter:
            reporter.tell(version)
            train_steps(config, run, policy, reporter, version)
        run.bring_back_engines()


def train_steps(config: Config, run: RunState, policy: Policy, reporter: Reporter, version: Version) -> None:
    """Train the steps after `version`. Between two steps, the monitor may pause the run or take it back."""
    while (version := heed(policy, run, reporter, version)).step < config.steps:
        step = version.step + 1
        with reporter.step(step) as report:
            learn(config, run, policy, report, version)
            run.demand_owner()  # or the checkpoint might replace one of the trainer that took over
            directories = save(config, policy, step)
            # Publishing makes the step count, so its checkpoint is durable before and engines get it after.
            version = run.publish(
                step, directories, report.metrics(),
                parent=version, fates=report.fates, scales=report.scales, imitated=report.imitated,
            )  # fmt: skip
            run.push(version)
            report.pushed(version)
        if run.ranks.rank == 0:
            prune(config, step)


def heed(policy: Policy, run: RunState, reporter: Reporter, version: Version) -> Version:
    """Do what the monitor asks for after `version`; return the version to go on from."""
    target = run.heed(version)
    if target.id != version.id:
        run.release_engines()
        load(policy, target)
        run.push(target)
        reporter.start_again()
    return target


def learn(config: Config, run: RunState, policy: Policy, report: StepReport, version: Version) -> None:
    """Lease the batch of the step after `version` and update the policy with it.

    A batch whose gradient is not finite is set aside, and the step goes on with other groups. Raises UserError after
    BATCHES such batches, and where the cause is in the version's weights.
    """
    step = version.step + 1
    for left in reversed(range(BATCHES)):
        try:
            return update(config, run, policy, report, step)
        except GradientNotFinite as error:
            load(policy, version)
            demand_finite(policy, version)
            run.drop_batch(step, error.norms)
            if not left:
                raise UserError(
                    f"the gradients of {BATCHES} batches in a row are not finite in step {step}; look at their groups "
                    "in the pool (gradient_not_finite), lower optimizer.lr or raise optimizer.eps, and start again"
                ) from error
            if config.push.colocated:
                run.push(version)  # a check of the engines while waiting would do it, but not empty torch's cache
            report.set_aside()


def demand_finite(policy: Policy, version: Version) -> None:
    """Raise UserError when the weights of a version, which are loaded, are not finite. Collective."""
    if not policy.is_finite():
        raise UserError(
            f"the weights of step {version.step} ({version.name}) are not finite, so that no batch can be learned "
            "from; go back to a step before it with `trainer rollback`, or begin with another model"
        )


def update(config: Config, run: RunState, policy: Policy, report: StepReport, step: int) -> None:
    """Lease a batch and update the policy with it."""
    ranks = run.ranks
    groups = run.wait_for_lease(step).groups
    report.leased(groups)
    per_key = key_cost(policy.shape)
    options = step_options(config, step, policy.mixture, run.scales_before(step))
    batch = assemble(groups, options, partial(group_cost, per_key=per_key))
    sources = run.to_imitate(step)
    demand_known_tokens((*batch.rows, *(row for rows in sources for row in rows)), policy.shape, policy.source)
    whole = mixed(batch.minibatches, sources, [source.weight for source in config.imitation], policy.mixture)
    planned = [plan(rows, ranks.data_world, config.batch.max_tokens, per_key) for rows in whole]
    run.release_engines()  # those on our devices sampled until the batch was complete; the step needs their memory
    micros_of = [[micro for micros in planned for micro in micros[rank]] for rank in range(ranks.data_world)]
    report.packed(batch, sources, micros_of)
    minibatches = [
        Minibatch(micros[ranks.data_rank], denominator(rows), trained_tokens(rows))
        for micros, rows in zip(planned, whole, strict=True)
    ]
    if (before := reference(config, step)) is not None:
        policy.refer_to(before)
    rule = configured(config.loss)
    loss = partial(policy_loss, rule=rule)
    rate = learning_rate(config.optimizer, step, config.steps)
    passes = orders(len(minibatches), config.loss.epochs, step)
    report.updated(policy.learn(minibatches, passes, loss, rate, rule.compares_with_old))


def resume(config: Config, policy: Policy, run: RunState) -> Version:
    """Bring policy, pool and engines to the latest published version and return it.

    A run that has published nothing publishes its initial weights as step 0.
    """
    version = run.latest()
    if version is None:
        version = run.publish(0, save(config, policy, 0), {})
        run.push(version)
        return version
    step = load(policy, version)
    if step != version.step:
        raise UserError(
            f"{version.checkpoint} holds step {step}, but the pool expects step {version.step} there; restore the "
            "checkpoint that belongs there"
        )
    run.reopen_after(step)
    run.push(version)
    return version


def load(policy: Policy, version: Version) -> int:
    """Load a version's checkpoint and return its step.

    Shows the seconds alone, since Megatron loads everything in one call and tells nothing meanwhile.
    """
    with policy.ranks.shown(f"loading {version.checkpoint}"):
        return policy.checkpoints.load(Path(version.checkpoint))


def save(config: Config, policy: Policy, step: int) -> tuple[Path, Path]:
    """Write a durable checkpoint, and the same weights for the engines; return both directories."""
    directory, model = checkpoint(config, step), exported(config, step)
    with policy.ranks.shown(atomic_dir.written(directory)):
        policy.checkpoints.save(directory, step, meanwhile=lambda: policy.write_hf(model))
    return directory, model


def prune(config: Config, step: int) -> None:
    """Delete all checkpoints and exported models but the newest `keep_checkpoints`."""
    for kind in ("checkpoints", "models"):
        for path in (Path(config.output) / kind).glob("step-*"):
            number = path.name.removeprefix("step-")
            # Other names, such as step-000003-copy, belong to the user and stay.
            if number.isdecimal() and int(number) <= step - config.keep_checkpoints:
                atomic_dir.remove(path)
