"""An experiment in a directory: one warm start, then a reinforcement run of the same weights for each of its settings.

Pool, engine and proxy serve both runs, one after the other.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from run import Demo
from settings import Settings, write_trainer_config
from tasks import families

from benchmarks.async_runs.timed_run import write_model
from benchmarks.signal_runs.experiments import Experiment, posed
from benchmarks.signal_runs.figures import conduct, curves


@dataclass(frozen=True, kw_only=True)
class RunSizes:
    """How much is run."""

    steps: int | None = None
    """Train steps. None: as many as the experiment says."""
    groups: int = 8
    group_size: int = 8
    episodes: int = 128
    """Held-out tasks of an evaluation."""
    warmup_tasks: int | None = None
    """Tasks that the teacher does. None: all."""
    warmup_steps: int = 300
    """The most steps of a warm start."""


QUICK = RunSizes(steps=2, groups=2, group_size=4, episodes=8, warmup_tasks=16, warmup_steps=10)


class LearningRun(Demo):
    """One experiment. `go` returns the figures of its runs."""

    def __init__(self, directory: Path, experiment: Experiment, sizes: RunSizes, seed: int, console: Console):
        directory.mkdir(parents=True)
        settings = Settings(
            seed=seed,
            steps=sizes.steps or experiment.steps,
            episodes=sizes.episodes,
            groups=sizes.groups,
            group_size=sizes.group_size,
            max_turns=experiment.max_turns,
        )
        super().__init__(directory, settings, console)
        self.experiment, self.sizes, self.teacher = experiment, sizes, experiment.teacher

    def go(self) -> dict[str, Any]:
        """Make the weights, and train them once for each run of the experiment."""
        self.warm_up()
        engine, gateway = self.serve()
        os.environ["OMP_NUM_THREADS"] = "1"  # engine, agents and trainer share the machine
        config = write_trainer_config(self.directory, self.settings, engine)
        figures: dict[str, Any] = {}
        for name, differs in self.experiment.runs.items():
            options = {"run": f'"{name}"', "output": f'"{self.directory}/policy-{name}"'}
            settings = {**self.experiment.settings, **differs}
            words = settings_words(options | settings)
            trainer = self.start(f"trainer-{name}", ["trainer", "launch", str(config), *words], ready=False)
            self.wait_pushed(trainer, name)
            if self.experiment.evaluated and not figures:
                figures["before"] = self.conduct("before", gateway)
            self.reinforce(gateway, trainer, name)
            after = self.conduct(f"after-{name}", gateway) if self.experiment.evaluated else {}
            figures[name] = {"settings": settings} | after | curves(self.pool, name)
        return figures

    def warm_up(self) -> None:
        """Make the weights that the runs begin with."""
        if not self.experiment.teacher:
            (self.directory / "logs").mkdir()
            write_model(self.directory)
            self.write_tasks()
            return
        self.record_teacher(self.prepare())
        options = {"sft.stop_loss": str(self.experiment.stop_loss), "sft.max_steps": str(self.sizes.warmup_steps)}
        self.imitate(*settings_words(options))

    def write_tasks(self) -> None:
        """Write the demo's tasks as the experiment poses them."""
        (self.directory / "tasks").mkdir()
        for name, tasks in families(self.settings.seed):
            some = tasks[: self.sizes.warmup_tasks] if name == "warmup" else tasks
            lines = (json.dumps(posed(task, self.experiment)) + "\n" for task in some)
            (self.directory / "tasks" / f"{name}.jsonl").write_text("".join(lines))

    def conduct(self, name: str, gateway: str) -> dict[str, Any]:
        """Evaluate the weights that the engine has, and return what the agents did."""
        self.evaluate(name, gateway)
        return conduct(self.pool, name)


def settings_words(settings: Mapping[str, str]) -> list[str]:
    """Return the options of a trainer's command that override these settings."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
