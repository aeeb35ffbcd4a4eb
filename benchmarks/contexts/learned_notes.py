"""One run in a directory: the demo's way with the project's own agent, whose context is too short for its tasks.

It begins with the recorded warm start of the demo, which can copy a word, because that takes most of a warm start. Left
out of the demo: the comparison of logprobs, which tests make, and the picture.
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from commands import run_command
from rich.console import Console
from run import Demo
from settings import ENGINE, RUN, Settings, write_sft_config, write_trainer_config
from sqlalchemy import select

from benchmarks.async_runs.timed_run import write_model
from benchmarks.contexts.readings import CONTEXT_TOKENS, SHARE, write
from proxy.pool.completions.store import of_attempts
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import attempts
from proxy.pool.training.steps import metrics

HERE = Path(__file__).parent
AGENTS = HERE.parents[1] / "harness" / "agents"
SETTINGS = {"tools": ["shell"], "system": "Work.", "threshold": [SHARE, SHARE]}
WITHOUT_NOTES = "examples.batch_function:without_notes"
"""The function that leaves out what the agent has written down because its context was full."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is run."""

    steps: int = 24
    groups: int = 8
    group_size: int = 8
    episodes: int = 128
    lessons: int = 2
    sft_steps: int = 150
    sft_lr: float = 1.5e-3
    lr: float = 4e-4


QUICK = Sizes(steps=1, groups=2, group_size=2, episodes=4, lessons=1, sft_steps=4)


class NotesRun(Demo):
    """Trains with its notes or without them. The first run of a seed records the teacher, too, and warms up."""

    teacher = f"{HERE / 'forgetful_teacher.py'}:teach"

    def __init__(self, directory: Path, sizes: Sizes, seed: int, console: Console):
        directory.mkdir(parents=True)
        settings = Settings(
            seed=seed, steps=sizes.steps, groups=sizes.groups, group_size=sizes.group_size,
            episodes=sizes.episodes, lessons=sizes.lessons,
        )  # fmt: skip
        super().__init__(directory, settings, console)
        self.sizes = sizes
        (directory / "agent.json").write_text(json.dumps(SETTINGS))
        self.agent = self._agent("threshold")

    def _agent(self, policy: str) -> str:
        options = f"--policy {policy} --context {CONTEXT_TOKENS} --settings {self.directory}/agent.json"
        return f'env PYTHONPATH={AGENTS} {sys.executable} -S -m native {options} -- "$INSTRUCTION"'

    def prepare(self) -> Path:
        """Write the tasks and the engine's configuration, and the demo's model; return the configuration's file."""
        (self.directory / "logs").mkdir()
        write(self.directory / "tasks", self.settings.seed)
        write_model(self.directory)
        (self.directory / "warm").rename(self.directory / "tiny")
        return self._engine_config("tiny")

    def _engine_config(self, model: str) -> Path:
        file = self.directory / f"engine-{model}.toml"
        long, short = "context_length = 2048", f"context_length = {CONTEXT_TOKENS}"
        assert long in ENGINE
        file.write_text(ENGINE.format(model=model).replace(long, short))
        return file

    def warm_up(self) -> None:
        """Record the teacher and imitate it."""
        self.record_teacher(self._engine_config("tiny"))
        self.say("warm start: imitating the recorded rollouts")
        words = ["--set", f"sft.max_steps={self.sizes.sft_steps}", "--set", f"sft.lr={self.sizes.sft_lr}"]
        run_command(["trainer", "sft", str(write_sft_config(self.directory, self.settings)), *words], self.log("sft"))

    def begin_like(self, other: "NotesRun") -> None:
        """Begin with the weights that another run began with."""
        shutil.copytree(other.directory / "warm", self.directory / "warm")

    def train(self, function: str, *, without: bool) -> dict[str, Any]:
        """Evaluate, train, evaluate again, and return the figures.

        `function`: what batch.function is set to; empty: notes are trained, too. `without`: also evaluate an agent that
        takes no notes.
        """
        engine, gateway = self._served()
        os.environ["OMP_NUM_THREADS"] = "1"  # engine, agents and trainer share the machine
        os.environ["PYTHONPATH"] = str(HERE.parents[1])  # where the trainer finds the function
        config = write_trainer_config(self.directory, self.settings, engine)
        overrides = {"batch.function": json.dumps(function), "optimizer.lr": self.sizes.lr}
        words = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
        trainer = self.start("trainer", ["trainer", "launch", str(config), *words], ready=False)
        self.wait_pushed(trainer)
        figures: dict[str, Any] = {"before": self.evaluate("eval-before", gateway)}
        if without:
            self.agent = self._agent("none")
            figures["without"] = self.evaluate("eval-without", gateway)
            self.agent = self._agent("threshold")
        self.reinforce(gateway, trainer)
        after = figures["after"] = self.evaluate("eval-after", gateway)
        steps = metrics(self.pool, find_run(self.pool, RUN).id)[1:]
        return figures | {
            "gain": after.mean - figures["before"].mean,
            "reward_by_step": [step.get("reward_mean") for step in steps],
            "context_tokens_p95": self.context_tokens("eval-after"),
        }

    def _served(self) -> tuple[str, str]:
        self.say("starting SGLang")
        config = str(self._engine_config("warm"))
        log = ["--log", str(self.log("sglang"))]
        engine = self.start("engine", ["proxy", "engine", config, *log]).wait_ready()["url"]
        gateway = self.start("proxy", ["proxy", "serve", config, "--engine", engine]).wait_ready()["url"]
        return engine, gateway

    def context_tokens(self, run: str) -> float:
        """The length that 95 % of a run's contexts, prompt and answer, do not exceed."""
        with self.pool.read() as connection:
            of_run = attempts.c.run_id == find_run(self.pool, run).id
            ids = list(connection.scalars(select(attempts.c.id).where(of_run)))
            calls = [item for chain in of_attempts(connection, ids).values() for item in chain]
        return float(np.percentile([item.prompt_length + len(item.sampled) for item in calls], 95))
