"""Back to an earlier step: policy, pool and engines, in one command that may be repeated.

The batches of later steps are leased again under their own numbers, so that the next `trainer launch` trains on them
again; the versions they led to are retired, and their names are never used again. Left out: checkpoints that
`checkpoint.keep` has deleted; the harness, which goes on sampling with what the engines then serve.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts import runs
from proxy.pool.training import steps
from trainer.commands.output_lock import hold
from trainer.config import Config
from trainer.push import PushResult, Weights, push


def roll_back(config: Config, step: int) -> str:
    """Go back to the checkpoint of `step` and say what that meant. UserError when it is not there any more."""
    lock = hold(Path(config.output))
    try:
        return _go_back(config, step)
    finally:
        os.close(lock)


def _go_back(config: Config, step: int) -> str:
    pool = open_pool(config.pool)
    run = runs.find_run(pool, config.run)
    target = _kept(steps.versions(pool, run.id), step, config)
    reopened = steps.reopen_after(pool, run.id, step)
    done = PushResult()
    if config.push.engines:
        done = push(Weights(target.name, Path(target.hf_dir)), config.push)
        steps.mark_pushed(pool, target.id)
    runs.record_event(pool, run.id, "rollback", f"to step {step}, {target.name}; {reopened} groups are trained again")
    engines = (
        f"{len(done.ways)} of {len(config.push.engines)} engines serve it"
        if config.push.engines
        else "no engine is configured"
    )
    return f"run {config.run} is at step {step} ({target.name}); {engines}; {reopened} groups will be trained again"


def _kept(found: Sequence[steps.Version], step: int, config: Config) -> steps.Version:
    """The version of this step, with its files."""
    whole = [version for version in found if Path(version.checkpoint).is_dir() and Path(version.hf_dir).is_dir()]
    for version in whole:
        if version.step == step:
            return version
    there = ", ".join(str(version.step) for version in whole) or "none"
    raise UserError(
        f"run {config.run!r} has no checkpoint of step {step}; there are those of: {there} "
        f"(checkpoint.keep = {config.checkpoint.keep})"
    )
