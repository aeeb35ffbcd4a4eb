"""Which recorded run a command is about: its directory here, or its name in a pool."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.run_dir import RunDir, Whereabouts
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import Run, find_run


def add_run(verb: argparse.ArgumentParser) -> None:
    """Add the arguments that name a run."""
    verb.add_argument("run_dir", type=Path, nargs="?", metavar="RUN_DIR", help="the run's directory")
    verb.add_argument("--pool", metavar="URL", help="the run's pool, if its directory is on another machine")
    verb.add_argument("--name", help="the run's name in that pool")


def whereabouts(given: argparse.Namespace) -> Whereabouts:
    """The run that a command's arguments name; UserError where they name none."""
    if given.run_dir is not None:
        return RunDir(given.run_dir).whereabouts()
    if given.pool is None or given.name is None:
        raise UserError("name the run's directory, or its pool and its name there with --pool and --name")
    return Whereabouts(pool=given.pool, name=given.name, expected=None)


@contextmanager
def opened_run(where: Whereabouts) -> Iterator[tuple[Pool, Run]]:
    """Give a run and its pool while the block lasts. UserError where there is none."""
    pool = open_pool(where.pool, create=False)
    try:
        yield pool, find_run(pool, where.name)
    finally:
        pool.close()
