"""The command `trainer doctor`: what this machine has to train on, and whether a configuration can run here."""

import argparse
from pathlib import Path

import msgspec

from proxy.pool.database import demand_reachable
from proxy.pool.errors import UserError
from proxy.pool.machine.child import ask
from proxy.pool.machine.facts import read_machine
from proxy.pool.machine.report import Report, write_report
from trainer.commands.checks import demand_trainable
from trainer.config import Config, Parallel, load_config
from trainer.doctor.examine import Facts, examine
from trainer.doctor.probe import TrainerProbe

USUAL_HEAD = 128
"""The head dimension to ask about where no model is named: that of Qwen3 and Llama."""


def add_arguments(doctor: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainer doctor`."""
    doctor.add_argument("config", nargs="?", help="say whether this training file can run here; then exit with 0 or 1")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a field")
    doctor.add_argument("--nproc", type=int, help="ranks on this machine (parallel.processes)")


def run_doctor(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit status: 1 when the configuration cannot run here."""
    config = None
    if arguments.config is not None:
        processes = [] if arguments.nproc is None else [f"parallel.processes={arguments.nproc}"]
        config = load_config(Path(arguments.config), [*arguments.set, *processes])
    report = examined(config, arguments.nproc or 1)
    print(write_report(report, as_json=arguments.json))
    return report.status


def examined(config: Config | None, ranks: int) -> Report:
    """Read the machine, ask the trainer's own code and report.

    `ranks`: those of this machine. `parallel.processes` counts those of all machines.
    """
    shape, errors = None, []
    if config:
        for check in (lambda: demand_trainable(config), lambda: demand_reachable(config.pool)):
            try:
                shape = check() or shape
            except UserError as error:
                errors.append(str(error))
    parallel = config.parallel if config else Parallel(precision="bfloat16")
    head = shape.head_dim if shape else USUAL_HEAD
    answer = ask("trainer.doctor.probe", parallel.precision, str(head), str(ranks))
    facts = Facts(
        machine=read_machine([Path(config.output) if config else Path.cwd()]),
        probe=msgspec.convert(answer, TrainerProbe),
        shape=shape,
        config_errors=tuple(errors),
    )
    return examine(facts, config)
