"""`trainer continue`: ends the pause of a run, from any machine that reaches its pool. Its trainer then goes on."""

import argparse
from pathlib import Path

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts import runs
from proxy.pool.training.interventions import go_on, paused
from trainer.config import load_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what names the run."""
    parser.add_argument("config", nargs="?", help="the settings file of the run's trainer")
    parser.add_argument("--pool", metavar="URL", help="the run's pool, where there is no file")
    parser.add_argument("--run", metavar="NAME", help="the run's name in that pool")


def end_pause(given: argparse.Namespace) -> str:
    """End the pauses of the run that the command line names; return a sentence about it."""
    if given.config is not None:
        config = load_config(Path(given.config))
        where, name = config.pool, given.run or config.run
    elif given.pool is not None and given.run is not None:
        where, name = given.pool, given.run
    else:
        raise UserError("name the trainer's settings file, or the run's pool and its name with --pool and --run")
    pool = open_pool(where, create=False)
    try:
        run = runs.find_run(pool, name)
        why = paused(pool, run.id)
        if not go_on(pool, run.id):
            raise UserError(f"run {name!r} is not paused, so there is nothing to continue")
        runs.record_event(pool, run.id, "continue", f"the pause by {why} is over")
    finally:
        pool.close()
    return f"run {name} goes on; it was paused by {why}"
