"""`make demo`: a tiny model learns terminal tasks on this machine, using the project's own commands only.

It records teacher rollouts through the proxy, warm-starts the model on them, evaluates it on held-out tasks, trains it
by reinforcement with the verifier's verdict as the only reward, and evaluates it again. The given directory then holds
pool.db, logs/, checkpoints, reward.png and summary.json.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from commands import Background, clear, run_command
from look import show
from report import Evaluation, StepTable, evaluation, summary, write_report
from rich.console import Console
from settings import RUN, Settings, write_engine_config, write_sft_config, write_trainer_config
from tasks import write as write_tasks

from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.steps import latest

HERE = Path(__file__).parent
AGENT = HERE.parent / "agents" / "shell_agent.py"
MARK = ".blackforge-demo"
"""File that tells a directory of the demo from any other."""


class Demo:
    """One demo in one directory. `close` ends its services."""

    teacher = f"{HERE / 'teacher.py'}:teach"

    def __init__(self, directory: Path, settings: Settings, console: Console):
        self.directory, self.settings, self.console = directory, settings, console
        self.agent = f"env MAX_TURNS={settings.max_turns} {sys.executable} -I -S {AGENT}"
        self.pool: Pool = open_pool(str(directory / "pool.db"))
        self._services: list[Background] = []
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        self.console.print(f"[{time.monotonic() - self._started:5.0f} s] {text}", highlight=False, markup=False)

    def log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def start(self, name: str, command: list[str], ready: bool = True) -> Background:
        """Start a service that runs until the demo ends or `stop` is called on it."""
        file = self.directory / f"{name}.ready" if ready else None
        service = Background(command, self.log(name), file)
        self._services.append(service)
        return service

    def close(self) -> None:
        for service in reversed(self._services):
            service.stop()

    def harness(self, verb: str, tasks: str, run: str, *more: str) -> list[str]:
        """Return a harness command on this demo's pool, with the small agent of examples/agents."""
        files = [str(self.directory / "tasks" / f"{tasks}.jsonl"), "--run-dir", str(self.directory / "runs" / run)]
        options = [
            "--sandbox",
            "process",
            "--agent",
            "command",
            "--command",
            self.agent,
            "--concurrency",
            str(self.settings.concurrency),
        ]
        return ["harness", verb, *files, *options, "--seed", str(self.settings.seed), *more]

    def learn(self) -> dict[str, Any]:
        """Run the whole demo and return the figures of summary.json."""
        config = self.prepare()
        self.record_teacher(config)
        self.imitate()
        engine, gateway = self.serve()
        trainer_config = write_trainer_config(self.directory, self.settings, engine)
        os.environ["OMP_NUM_THREADS"] = "1"  # from here on the trainer shares the machine with engine and agents
        trainer = self.start("trainer", ["trainer", "launch", str(trainer_config)], ready=False)
        self.wait_pushed(trainer)
        before = self.evaluate("eval-before", gateway)
        self.reinforce(gateway, trainer)
        after = self.evaluate("eval-after", gateway)
        self.say("comparing the engine's logprobs with the trainer's")
        figures = summary(self.pool, RUN, before, after) | self.compare(trainer_config)
        return figures | {"seed": self.settings.seed, "wall_seconds": round(time.monotonic() - self._started, 1)}

    def prepare(self) -> Path:
        """Make the model, the tasks and the engine's configuration; return the latter's file."""
        self.say("making a tiny model and the tasks")
        (self.directory / "logs").mkdir()
        run_command(
            ["proxy", "tiny-model", str(self.directory / "tiny"), "--seed", str(self.settings.seed)], self.log("model")
        )
        self.write_tasks()
        return write_engine_config(self.directory, "tiny")

    def write_tasks(self) -> None:
        write_tasks(self.directory / "tasks", self.settings.seed)

    def record_teacher(self, config: Path) -> None:
        """Record rollouts of the careless teacher through the same proxy and agent as everything else."""
        self.say("recording teacher rollouts through the proxy")
        engine = self.start("teacher-engine", ["proxy", "engine", str(config), "--scripted", self.teacher])
        serve = ["proxy", "serve", str(config), "--engine", engine.wait_ready()["url"]]
        gateway = self.start("teacher-proxy", serve)
        more = ["-n", str(self.settings.lessons), "--proxy", gateway.wait_ready()["url"]]
        run_command(self.harness("collect", "warmup", "teacher", *more), self.log("teacher"))
        gateway.stop()
        engine.stop()

    def imitate(self, *more: str) -> None:
        """Warm-start the model on the teacher's rollouts. `more`: further options of `trainer sft`."""
        self.say("warm start: imitating the recorded rollouts")
        run_command(["trainer", "sft", str(write_sft_config(self.directory, self.settings)), *more], self.log("sft"))

    def serve(self) -> tuple[str, str]:
        """Start SGLang with the warm-started model and the proxy in front of it; return both URLs."""
        self.say("starting SGLang")
        config = write_engine_config(self.directory, "warm")
        engine = self.start("engine", ["proxy", "engine", str(config), "--log", str(self.log("sglang"))]).wait_ready()[
            "url"
        ]
        gateway = self.start("proxy", ["proxy", "serve", str(config), "--engine", engine]).wait_ready()["url"]
        return engine, gateway

    def wait_pushed(self, trainer: Background, run: str = RUN) -> None:
        """Wait until the trainer has pushed the initial weights to the engine, under a version name of its own."""
        self.say("waiting for the trainer's first push")
        while not self._pushed(run):
            trainer.check()
            time.sleep(0.1)

    def _pushed(self, run: str) -> bool:
        try:
            version = latest(self.pool, find_run(self.pool, run).id)
        except UserError:  # the trainer has not opened its run yet
            return False
        return version is not None and version.pushed_at is not None

    def evaluate(self, name: str, gateway: str) -> Evaluation:
        """Run one episode for each of the first held-out tasks, sampled at temperature 1."""
        self.say(f"{name}: {self.settings.episodes} held-out episodes")
        limit = ["--limit", str(self.settings.episodes), "--proxy", gateway]
        run_command(self.harness("eval", "heldout", name, *limit), self.log(name))
        result = evaluation(self.pool, name)
        self.say(f"{name}: success {result.mean:.3f}")
        return result

    def reinforce(self, gateway: str, trainer: Background, run: str = RUN) -> None:
        """Feed the trainer with rollouts until it has taken its steps, and print each step."""
        self.say("reinforcement: rollouts and trainer side by side")
        more = ["-n", str(self.settings.group_size), "--until-step", str(self.settings.steps), "--proxy", gateway]
        rollouts = self.start("harness", self.harness("run", "train", run, *more), ready=False)
        table = StepTable(self.pool, run, self.console)
        while trainer.running() or rollouts.running():
            trainer.check()
            rollouts.check()
            table.update()
            time.sleep(0.2)
        trainer.check()
        rollouts.check()
        table.update()

    def compare(self, config: Path) -> dict[str, Any]:
        """Compare the logprobs of engine and trainer on the last evaluation, which the final weights sampled."""
        out = self.log("logprobs")
        run_command(["trainer", "logprobs", str(config), "--run", "eval-after"], out)
        result = json.loads(out.read_text().splitlines()[-1])
        return {key: result[key] for key in ("max_abs_logprob_diff", "logprob_tokens_compared")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--control", action="store_true", help="shuffle the rewards within each group")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    parser.add_argument("--episodes", type=int, default=Settings.episodes, help="held-out episodes per evaluation")
    options = parser.parse_args()
    settings = Settings(seed=options.seed, control=options.control, steps=options.steps, episodes=options.episodes)
    clear(options.directory, MARK)
    console = Console()
    demo = Demo(options.directory.absolute(), settings, console)
    try:
        figures = demo.learn()
    finally:
        demo.close()
    write_report(options.directory, figures, console)
    show(options.directory / "pool.db", console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
