"""One of the two runs: the demo's reinforcement from recorded weights, with commands that take long, in a directory.

Each run has a pool, an engine, a proxy, a harness and a trainer of its own. Left out of the demo: teacher, warm start
and evaluations.
"""

import json
import math
import os
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from random import Random

from rich.console import Console
from run import Demo
from settings import Settings, write_trainer_config
from tasks import families

from proxy.engine.tiny_model import make_tiny_model
from trainer.config.batch import BatchConfig

SIGMA, LONGEST = 1.5, 60.0
"""Sleeps are lognormal, as times are in benchmarks/schedules; the longest takes so many medians."""
AGENT = Path(__file__).parent / "slow_agent.py"
ARCHIVE = Path(__file__).parents[1] / "demo_rollouts" / "demo.tar.xz"
WEIGHTS = ("warm/config.json", "warm/model.safetensors")
AGENT_SECONDS, VERIFIER_SECONDS = 600, 60
"""Time limits that a busy machine does not reach either."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is run."""

    steps: int = 24
    groups: int = 8
    group_size: int = 8
    median_seconds: float = 0.3
    """Of a sleep."""
    lr: float = 4e-4
    """Twice the demo's, for half of its steps."""


QUICK = Sizes(steps=2, groups=2, group_size=2, median_seconds=0.05)


class TimedRun(Demo):
    """A run under one schedule. `go` returns when its steps are trained."""

    def __init__(self, directory: Path, batch: BatchConfig, sizes: Sizes, seed: int, console: Console):
        directory.mkdir(parents=True)
        # All groups that `windowed` may open sleep at once, in both runs.
        concurrency = BatchConfig(groups=batch.groups).open_groups * sizes.group_size
        settings = Settings(
            seed=seed,
            steps=sizes.steps,
            groups=batch.groups,
            group_size=sizes.group_size,
            concurrency=concurrency,
        )
        super().__init__(directory, settings, console)
        self.batch, self.sizes = batch, sizes
        (directory / "taken").mkdir()
        self.agent = f"env MAX_TURNS={settings.max_turns} TAKEN={directory}/taken {sys.executable} -I -S {AGENT}"

    def go(self) -> None:
        """Make the weights and the tasks, start everything, and wait until the last step is pushed."""
        os.environ["OMP_NUM_THREADS"] = "1"  # engine, agents and trainer share the machine
        (self.directory / "logs").mkdir()
        write_model(self.directory)
        write_tasks(self.directory / "tasks", self.sizes, self.settings.seed)
        engine, gateway = self.serve()
        overrides = {"batch.schedule": f'"{self.batch.schedule}"', "optimizer.lr": self.sizes.lr}
        words = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
        config = write_trainer_config(self.directory, self.settings, engine)
        trainer = self.start("trainer", ["trainer", "launch", str(config), *words], ready=False)
        self.wait_pushed(trainer)
        self.reinforce(gateway, trainer)


def write_model(directory: Path) -> None:
    """Write the warm-started model that the recorded demo began with, which solves a quarter of the tasks."""
    make_tiny_model(directory / "warm")  # for the tokenizer; config and weights are replaced
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(directory, [archive.getmember(name) for name in WEIGHTS], filter="data")


def write_tasks(directory: Path, sizes: Sizes, seed: int) -> None:
    """Write the demo's tasks for reinforcement, each with the seconds that its attempts sleep."""
    directory.mkdir()
    lines = []
    for task in dict(families(seed))["train"]:
        sleeps = " ".join(f"{seconds:.3f}" for seconds in sleeps_of(task["id"], sizes, seed))
        task |= {"timeout": AGENT_SECONDS, "env": {"TASK": task["id"], "SLEEPS": sleeps}}
        task["verifier"] |= {"timeout": VERIFIER_SECONDS}
        lines.append(json.dumps(task) + "\n")
    (directory / "train.jsonl").write_text("".join(lines))


def sleeps_of(task: str, sizes: Sizes, seed: int) -> list[float]:
    """Return the seconds that the attempts of a group of this task sleep."""
    draw = Random(f"{seed} {task}")
    return [sizes.median_seconds * min(LONGEST, math.exp(SIGMA * draw.gauss())) for _ in range(sizes.group_size)]
