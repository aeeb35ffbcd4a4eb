"""`trainer launch|sft|logprobs|rollback|inspect CONFIG`.

The command line checks configuration and model directory, then starts the ranks (trainer/commands/ranks.py). It does
not import torch; the ranks do.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.pool.errors import PoolError, UserError
from trainer.commands.ranks import run_ranks
from trainer.commands.rollback import roll_back
from trainer.config import Config, load_config
from trainer.config.model_shape import demand_served, demand_splits, read_shape
from trainer.data.routed_experts import replayed
from trainer.report.inspect import Wish, inspect


@dataclass(frozen=True)
class Command:
    """A parsed command line."""

    verb: str
    config: Config
    run: str
    arguments: list[str]
    to: int | None
    """The step that a rollback goes to."""
    wish: Wish | None
    """What `inspect` is to show."""


def main(argv: list[str] | None = None) -> int:
    """The console script. Returns the exit status: 2 for a mistake of the user, told in one sentence."""
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        if command.to is not None:
            print(roll_back(command.config, command.to))
            return 0
        if command.wish is not None:
            inspect(command.config, command.wish)
            return 0
        shape = read_shape(Path(command.config.model))
        demand_splits(shape, command.config.parallel)
        demand_served(shape, command.config.push.engines)
        replayed(command.config.loss, shape)
    except (UserError, PoolError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return run_ranks(command.arguments, command.config.parallel)


def parse(argv: Sequence[str]) -> Command:
    """Read the command line and the configuration it names. UserError when the configuration is wrong."""
    arguments = _parser().parse_args(argv)
    overrides = list(arguments.set)
    if arguments.steps is not None:
        overrides.append(f"steps={arguments.steps}")
    if arguments.nproc is not None:
        overrides.append(f"parallel.processes={arguments.nproc}")
    config = load_config(Path(arguments.config), overrides)
    run = arguments.run or config.run
    passed = [f"--set={override}" for override in overrides] + ([f"--run={run}"] if arguments.run else [])
    wish = None
    if arguments.verb == "inspect":
        wish = Wish(step=arguments.step, rollout=arguments.rollout, limit=arguments.limit, html=arguments.html)
    return Command(arguments.verb, config, run, [arguments.verb, arguments.config, *passed], arguments.to, wish)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trainer", description="Turn recorded rollouts into a better policy.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    texts = {
        "launch": "train a run: CISPO on its finished groups, new weights to the engines after every step",
        "sft": "warm start: imitate recorded rollouts and write a model directory",
        "rollback": "go back to the checkpoint of an earlier step: pool and engines too",
        "inspect": "show what a step trained on, token by token, coloured by how strongly each was pulled",
        "logprobs": "compare the engine's logprobs with the trainer's and print JSON",
    }
    for verb, text in texts.items():
        sub = verbs.add_parser(verb, help=text, description=text)
        sub.add_argument("config", help="a TOML file; trainer/config/__init__.py explains every field")
        sub.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a field")
        sub.add_argument("--nproc", type=int, help="ranks on this machine (parallel.processes)")
        sub.set_defaults(steps=None, run=None, to=None)
        if verb == "launch":
            sub.add_argument("--steps", type=int, help="the run ends when this many steps are published")
        if verb == "rollback":
            sub.add_argument("--to", type=int, required=True, metavar="STEP", help="0: the initial weights")
        if verb == "inspect":
            sub.add_argument("step", type=int, help="a published step of the run")
            sub.add_argument("--html", type=Path, metavar="FILE", help="write a page instead, with every number")
            sub.add_argument("--rollout", type=int, metavar="ID", help="only this rollout")
            sub.add_argument("--limit", type=int, metavar="N", help="at most N rollouts")
        if verb == "logprobs":
            sub.add_argument("--run", help="the run that holds the completions; default: the configuration's run")
    return parser
