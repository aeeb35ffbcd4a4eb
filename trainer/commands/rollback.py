"""`trainer rollback`: take the run, the pool and the engines back to an earlier step. Repeating it does no harm.

The batches of later steps are leased again under their old numbers, so that the next `trainer launch` trains on them
again, or with `--discard` they are never trained; the versions they led to are retired, and their names are never used
again. Not here: checkpoints that `keep_checkpoints` has deleted; the harness, which keeps sampling with whatever the
engines serve.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.processes.owners import TRAINER, owned
from proxy.pool.rollouts import runs
from proxy.pool.training import steps
from proxy.pool.training.evaluations import held_engines
from proxy.pool.training.interventions import Cause, discard_after
from trainer.commands.output_lock import lock_output
from trainer.config import Config
from trainer.push.held import without_held
from trainer.push.push import PushResult, push
from trainer.push.weights import Weights
from trainer.step_files import complete

BY_HAND = "rollback"
"""Stands for the monitor's rule where a person asks."""


def roll_back(config: Config, step: int, discard: bool = False) -> str:
    """Go back to the checkpoint of `step` and return a sentence about it. Raises UserError when it was deleted.

    `discard`: the batches of later steps are not trained again.
    """
    lock = lock_output(Path(config.output))
    try:
        return _go_back(config, step, discard)
    finally:
        os.close(lock)


def _go_back(config: Config, step: int, discard: bool) -> str:
    pool = open_pool(config.pool)
    run = runs.find_run(pool, config.run)
    target = _version_of(step, steps.versions(pool, run.id), config)
    with owned(pool, run, TRAINER) as claim, claim.kept():
        # The pool goes first: if the push fails, the next start resumes at `step` and pushes it again.
        if discard:
            count = discard_after(pool, run.id, step, Cause(BY_HAND, f"to step {step}"), claim.token)
        else:
            count = steps.reopen_after(pool, run.id, step, claim.token)
        pushed, held = PushResult(), dict[str, str]()
        if config.push.engines:
            options, held = without_held(config.push, held_engines(pool, run.id), target.name)
            pushed = push(Weights(target.name, Path(target.hf_dir)), options, claim.demand)
            steps.mark_pushed(pool, target, claim.token)
    become = "are discarded" if discard else "will be trained again"
    runs.record_event(pool, run.id, "rollback", f"to step {step}, {target.name}; {count} groups {become}")
    served = _served(config, pushed, held)
    return f"run {config.run} is at step {step} ({target.name}); {served}; {count} groups {become}"


def _served(config: Config, pushed: PushResult, held: Mapping[str, str]) -> str:
    """Say how many engines serve the step. `held`: URL -> version of those that evaluations hold at an earlier one."""
    if not config.push.engines:
        return "no engine is configured"
    stay = "".join(f", and {url} stays at {name} while the evaluation of {name} goes on" for url, name in held.items())
    return f"{len(pushed.ways)} of {len(config.push.engines)} engines serve it{stay}"


def _version_of(step: int, versions: Sequence[steps.Version], config: Config) -> steps.Version:
    """Return the version of this step. Raises UserError when its files, or the KL reference after it, are gone."""
    kept = [version for version in versions if complete(config, version)]
    for version in kept:
        if version.step == step:
            return version
    existing = ", ".join(str(version.step) for version in kept) or "none"
    ago = config.loss.kl_steps_ago
    needed = f" and the policy of {ago} steps before it (loss.kl_steps_ago)" if ago else ""
    raise UserError(
        f"run {config.run!r} has no checkpoint of step {step}{needed}; the steps that have one are: {existing} "
        f"(keep_checkpoints = {config.keep_checkpoints})"
    )
