"""The command line: `trainer VERB CONFIG`, or `trainer launch --proxy URL`.

It checks configuration and model directory, then starts the ranks (trainer/commands/ranks.py). It does not import
torch, so mistakes are reported at once; the ranks import it.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from proxy.pool.errors import PoolError, UserError
from proxy.pool.terminal.command_line import CommandParser, add_common
from proxy.pool.terminal.errors import error_line
from trainer.commands import end_pause
from trainer.commands.checks import demand_trainable
from trainer.commands.doctor import add_arguments, run_doctor
from trainer.commands.ranks import run_ranks
from trainer.commands.rollback import roll_back
from trainer.commands.without_file import add_options, settings_file
from trainer.config import Config, load_config
from trainer.report.inspect import InspectOptions, inspect

EXAMPLES = {
    "launch": "trainer launch --proxy http://127.0.0.1:8000",
    "sft": "trainer sft warm.toml",
    "rollback": "trainer rollback train.toml --to 8",
    "inspect": "trainer inspect train.toml 12 --html step.html",
    "logprobs": "trainer logprobs train.toml --run after",
}


@dataclass(frozen=True)
class TrainerCommand:
    """A parsed command line."""

    verb: str
    config: Config
    run: str
    arguments: list[str]
    """What the ranks are started with."""
    to: int | None
    """The step that `rollback` goes back to; None for the other verbs."""
    discard: bool
    """Whether `rollback` discards the batches since."""
    inspect: InspectOptions | None
    """What `inspect` shows; None for the other verbs."""


def main(argv: list[str] | None = None) -> int:
    """Run the console script and return its exit status: 2 for a mistake of the user, which one sentence explains."""
    try:
        words = sys.argv[1:] if argv is None else argv
        if words[:1] == ["doctor"]:
            return run_doctor(parser().parse_args(words))
        if words[:1] == ["continue"]:
            print(end_pause.end_pause(parser().parse_args(words)))
            return 0
        command = parse(words)
        if command.to is not None:
            print(roll_back(command.config, command.to, command.discard))
            return 0
        if command.inspect is not None:
            inspect(command.config, command.inspect)
            return 0
        demand_trainable(command.config)
    except (UserError, PoolError) as error:
        print(error_line(error), file=sys.stderr)
        return 2
    return run_ranks(command.arguments, command.config.parallel)


def parse(argv: Sequence[str]) -> TrainerCommand:
    """Read the command line and the configuration it names. Raises UserError when the configuration is wrong."""
    arguments = parser().parse_args(argv)
    overrides = list(arguments.set)
    if arguments.steps is not None:
        overrides.append(f"steps={arguments.steps}")
    if arguments.nproc is not None:
        overrides.append(f"parallel.processes={arguments.nproc}")
    if arguments.verb == "launch":
        arguments.config = str(settings_file(arguments, overrides))
        if arguments.run is not None:
            overrides.append(f"run={arguments.run}")
            arguments.run = None  # an override for the ranks, as the others
    config = load_config(Path(arguments.config), overrides)
    run = arguments.run or config.run
    passed = [f"--set={override}" for override in overrides] + ([f"--run={run}"] if arguments.run else [])
    options = None
    if arguments.verb == "inspect":
        options = InspectOptions(
            step=arguments.step, rollout=arguments.rollout, limit=arguments.limit, html=arguments.html
        )
    return TrainerCommand(
        arguments.verb,
        config,
        run,
        [arguments.verb, arguments.config, *passed],
        arguments.to,
        arguments.discard,
        options,
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top: argparse.ArgumentParser = CommandParser(
        prog="trainer", description="Turn recorded rollouts into a better policy."
    )
    add_common(top)
    verbs = top.add_subparsers(dest="verb", required=True)
    texts = {
        "launch": "train a run on its finished groups and push new weights to the engines after every step",
        "sft": "warm start: imitate recorded rollouts, then write a model directory",
        "rollback": "take the run, the pool and the engines back to the checkpoint of an earlier step",
        "inspect": "show what a step trained on, each token coloured by its coefficient in the loss",
        "logprobs": "compare the engine's logprobs with the trainer's and print JSON",
    }
    for verb, text in texts.items():
        sub = verbs.add_parser(verb, help=text, description=text, epilog=f"example: {EXAMPLES[verb]}")
        optional = "?" if verb == "launch" else None
        sub.add_argument("config", nargs=optional, help="a TOML file; trainer/config/__init__.py explains every field")
        sub.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a field")
        sub.add_argument("--nproc", type=int, help="ranks on this machine (parallel.processes)")
        sub.set_defaults(steps=None, run=None, to=None, discard=False)
        if verb == "launch":
            sub.add_argument("--steps", type=int, help="end the run when this many steps are published")
            add_options(sub)
        if verb == "rollback":
            sub.add_argument("--to", type=int, required=True, metavar="STEP", help="0: the initial weights")
            sub.add_argument("--discard", action="store_true", help="never train on the batches of later steps again")
        if verb == "inspect":
            sub.add_argument("step", type=int, help="a published step of the run")
            sub.add_argument("--html", type=Path, metavar="FILE", help="write an HTML page with every number instead")
            sub.add_argument("--rollout", type=int, metavar="ID", help="show only this rollout")
            sub.add_argument("--limit", type=int, metavar="N", help="show at most N rollouts")
        if verb == "logprobs":
            sub.add_argument("--run", help="the run that holds the completions; default: the configuration's run")
    text = "end the pause of a run, which a rule of the monitor has begun"
    end_pause.add_arguments(
        verbs.add_parser("continue", help=text, description=text, epilog="example: trainer continue train.toml")
    )
    text = "say what this machine has to train on, and what is missing"
    add_arguments(
        verbs.add_parser("doctor", help=text, description=text, epilog="example: trainer doctor runs/train.toml")
    )
    return top
