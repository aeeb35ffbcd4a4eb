"""`make demo-scaffolds`: a tiny model is trained with two agents, and evaluated with these and with two others.

The agents are packages of third parties, unmodified (smolagents, mini-swe-agent, aider), and the project's own. A
careless teacher is recorded with all four, and the model imitates it. Then it is trained by reinforcement with
smolagents and mini-swe-agent alone; the verifier's verdict is the only reward. Every agent is evaluated before the
first train step and after the last, at held-out tasks and at some of the trained ones. The directory then holds
pool.db, logs/ and summary.json.

It begins with the weights with which the recorded demo of benchmarks/demo_rollouts began, which can copy a word: to
learn that takes most of a warm start. Left out: what takes more than 25 minutes on two cores (--help has the sizes),
and evaluations during training: here is one engine, which gets new weights while they sample (docs/runs.md).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "demo")]

from assignments import write as write_tasks  # noqa: E402
from commands import Background, clear, run_command  # noqa: E402
from rich.console import Console  # noqa: E402
from run import Demo  # noqa: E402  # the demo's modules are scripts
from settings import ENGINE, RUN, Settings, write_sft_config, write_trainer_config  # noqa: E402

from benchmarks.async_runs.timed_run import write_model  # noqa: E402
from benchmarks.result import provenance  # noqa: E402
from harness.commands.evaluations import matrix_table  # noqa: E402
from harness.monitor.progress import make_console  # noqa: E402
from proxy.pool.inspect.evaluated import MatrixRow, as_json, points, trained_agents  # noqa: E402
from proxy.pool.rollouts.runs import find_run  # noqa: E402
from proxy.pool.training.evaluations import Evaluates, Evaluation  # noqa: E402
from proxy.pool.training.steps import latest, metrics  # noqa: E402

MARK = ".blackforge-scaffolds"
"""File that tells a directory of this example from any other."""
CONTEXT_TOKENS = 8192
TRAINED, HELD_OUT = ("smolagents", "mini-swe-agent"), ("aider", "native")
CURVES = ("reward_mean", "reward_by_agent", "turns_by_agent", "length_by_agent", "share_by_agent")
TREES = ("call_tokens", "flat_tokens", "computed_tokens", "speedup_flops", "speedup_calls_flops", "kl_rollout")
"""Metrics of each step that the summary keeps."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is run."""

    lessons: int = 64
    """Tasks of the teacher, each twice by one agent."""
    steps: int = 10
    groups: int = 4
    group_size: int = 4
    heldout: int = 12
    """Held-out tasks of an evaluation; each agent works at each."""
    known: int = 4
    """Trained tasks of an evaluation: those with which the run begins."""
    sft_steps: int = 300
    sft_lr: float = 2e-3
    lr: float = 4e-4


class ScaffoldsRun(Demo):
    """The demo's way with four agents."""

    teacher = f"{HERE / 'four_formats.py'}:teach"

    def __init__(self, directory: Path, sizes: Sizes, seed: int, console: Console):
        settings = Settings(seed=seed, steps=sizes.steps, groups=sizes.groups, group_size=sizes.group_size)
        super().__init__(directory, settings, console)
        self.sizes = sizes
        self.agents = {name: f'agent = "{name}"' for name in ("smolagents", "mini-swe-agent", "aider")}
        self.agents["native"] = 'agent = "native-none"'

    def prepare(self) -> Path:
        """Write the tasks, the model and the engine's configuration; return the configuration's file."""
        self.say("making the tasks and the model")
        (self.directory / "logs").mkdir()
        sizes = {"warmup": self.sizes.lessons, "train": 48, "heldout": self.sizes.heldout}
        write_tasks(self.directory / "tasks", self.settings.seed, sizes, self.sizes.known)
        write_model(self.directory)
        (self.directory / "warm").rename(self.directory / "tiny")
        return self.engine_config("tiny")

    def engine_config(self, model: str) -> Path:
        file = self.directory / f"engine-{model}.toml"
        text = ENGINE.format(model=model).replace("context_length = 2048", f"context_length = {CONTEXT_TOKENS}")
        file.write_text(text)
        return file

    def run_file(self, run: str, tasks: str, weights: dict[str, float], *more: str) -> str:
        """Write the file of a run. Agents without a weight have none of its rollouts, and are held out."""
        entries = [
            f'[[agents]]\nname = "{name}"\n{agent}\nweight = {weights.get(name, 0)}'
            + ("" if name in weights else "\nheld_out = true")
            for name, agent in self.agents.items()
        ]
        lines = [
            f'tasks = "tasks/{tasks}.jsonl"', f'run_dir = "runs/{run}"', 'sandbox = "process"', "concurrency = 4",
            f"seed = {self.settings.seed}", *more, *entries,
        ]  # fmt: skip
        file = self.directory / f"{run}.toml"
        file.write_text("\n".join(lines) + "\n")
        return str(file)

    def record_teacher(self, config: Path) -> None:
        self.say("recording the teacher with all four agents")
        engine = self.start("teacher-engine", ["proxy", "engine", str(config), "--scripted", self.teacher])
        serve = ["proxy", "serve", str(config), "--engine", engine.wait_ready()["url"]]
        gateway = self.start("teacher-proxy", serve)
        file = self.run_file("teacher", "warmup", dict.fromkeys(self.agents, 1.0), "group_size = 2")
        run_command(["harness", "collect", file, "--proxy", gateway.wait_ready()["url"]], self.log("teacher"))
        gateway.stop()
        engine.stop()

    def imitate(self, *more: str) -> None:
        self.say("warm start: imitating what was recorded")
        options = {"max_steps": self.sizes.sft_steps, "lr": self.sizes.sft_lr, "stop_loss": 0.012}
        words = [word for key, value in options.items() for word in ("--set", f"sft.{key}={value}")]
        words += ["--set", f"batch.max_tokens={2 * CONTEXT_TOKENS}", *more]
        run_command(["trainer", "sft", str(write_sft_config(self.directory, self.settings)), *words], self.log("sft"))

    def learn(self) -> dict[str, Any]:
        """Run all of it and return the figures of summary.json."""
        began = time.monotonic()
        self.record_teacher(self.prepare())
        self.imitate()
        self.say("starting SGLang")
        config = str(self.engine_config("warm"))
        log = ["--log", str(self.log("sglang"))]
        engine = self.start("engine", ["proxy", "engine", config, *log]).wait_ready()["url"]
        gateway = self.start("proxy", ["proxy", "serve", config, "--engine", engine]).wait_ready()["url"]
        os.environ["OMP_NUM_THREADS"] = "1"  # engine, agents and trainer share the machine
        trainer_file = write_trainer_config(self.directory, self.settings, engine)
        overrides = {"batch.max_tokens": 2 * CONTEXT_TOKENS, "optimizer.lr": self.sizes.lr}
        words = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
        trainer = self.start("trainer", ["trainer", "launch", str(trainer_file), *words], ready=False)
        self.wait_pushed(trainer)
        before = self.evaluate_agents("before", gateway)
        self.reinforce(gateway, trainer)
        figures = self.figures(before, self.evaluate_agents("after", gateway))
        return figures | {"seed": self.settings.seed, "wall_seconds": round(time.monotonic() - began, 1)}

    def evaluate_agents(self, when: str, gateway: str) -> list[Evaluation]:
        """Give every agent every evaluated task once, in a run of its own. Nothing is trained meanwhile."""
        run = find_run(self.pool, RUN)
        version = latest(self.pool, run.id)
        assert version is not None
        tasks = self.sizes.heldout + self.sizes.known
        of = Evaluates(run=run.name, run_id=run.id, version=version.name, step=version.step, rollouts=tasks)
        found = []
        for agent in self.agents:
            self.say(f"evaluating step {version.step} with {agent}")
            name = f"{when}-{agent}"
            file = self.run_file(name, "evaluated", {agent: 1.0})
            run_command(["harness", "eval", file, "--proxy", gateway], self.log(name))
            found.append(Evaluation(run_id=find_run(self.pool, name).id, name=name, of=of))
        return found

    def reinforce(self, gateway: str, trainer: Background, run: str = RUN) -> None:
        """Feed the trainer until it has taken its last step and ended."""
        self.say(f"reinforcement with {' and '.join(TRAINED)}; {' and '.join(HELD_OUT)} are held out")
        more = [f"group_size = {self.sizes.group_size}", f"until_step = {self.sizes.steps}"]
        file = self.run_file(run, "train", dict.fromkeys(TRAINED, 1.0), *more)
        rollouts = self.start("harness", ["harness", "run", file, "--proxy", gateway], ready=False)
        seen = 0
        while trainer.running() or rollouts.running():
            trainer.check()
            rollouts.check()
            seen = self._tell(seen)
            time.sleep(0.5)
        trainer.check()
        rollouts.check()
        self._tell(seen)

    def _tell(self, seen: int) -> int:
        """Print the steps behind the first `seen`; return how many there are."""
        steps = metrics(self.pool, find_run(self.pool, RUN).id)[1:]
        for step in steps[seen:]:
            rewards = ", ".join(f"{agent} {reward:.2f}" for agent, reward in step["reward_by_agent"].items())
            self.say(f"step {step['step']}: reward {rewards}; {step['trained_tokens']} tokens")
        return len(steps)

    def figures(self, before: list[Evaluation], after: list[Evaluation]) -> dict[str, Any]:
        """Print the matrix of both evaluations and return the figures of summary.json."""
        run_id = find_run(self.pool, RUN).id
        rows = [self._matrix_row(before, ()), self._matrix_row(after, sorted(trained_agents(self.pool, run_id)))]
        self.console.print("Mean rewards by policy", matrix_table(rows), sep="\n")
        steps = metrics(self.pool, run_id)[1:]
        curves = {name: [step.get(name) for step in steps] for name in (*CURVES, *TREES)}
        found = [point for row in rows for point in row.points]
        return as_json(found, rows) | {"steps": len(steps), "sizes": vars(self.sizes), "curves": curves}

    def _matrix_row(self, evaluated: list[Evaluation], trained: Sequence[str]) -> MatrixRow:
        of = evaluated[0].of
        return MatrixRow(of.run, tuple(trained), of.step, of.version, points(self.pool, evaluated))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    for name in ("lessons", "steps", "heldout", "known", "sft_steps"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(Sizes, name))
    options = vars(parser.parse_args())
    directory, seed = options.pop("directory"), options.pop("seed")
    clear(directory, MARK)
    console = make_console()
    demo = ScaffoldsRun(directory.absolute(), Sizes(**options), seed, console)
    try:
        measured = provenance("") | {"command": " ".join(["examples/scaffolds/learn.py", *sys.argv[1:]])}
        figures = measured | demo.learn()
    finally:
        demo.close()
    (directory / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"{figures['wall_seconds']:.0f} s; summary: {directory / 'summary.json'}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
