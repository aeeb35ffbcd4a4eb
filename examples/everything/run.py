"""`make everything`: every part of this project in one small run, by its own commands only (docs/everything.md).

Agents in Docker containers talk to a real SGLang in four dialects, PostgreSQL holds what they did, and the trainer
learns from it in prefix trees while they go on. The given directory then holds report.json, logs/ and the checkpoints.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console

from examples.demo.commands import Background, clear, run_command
from examples.demo.report import StepTable
from examples.everything.database import binaries, private_database
from examples.everything.report import RUN, absent, report, table
from harness.agents import INSTALLED
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import find_run

FILES = Path(__file__).parent / "files"
MARK = ".blackforge-everything"
"""File that tells a directory of this recipe from any other."""
AGENTS = ("mini-swe-agent", "codex")
STEPS = 6


class Recipe:
    """One run of the recipe in one directory. Its services end with `stack`."""

    def __init__(self, directory: Path, seed: int, steps: int, stack: ExitStack, console: Console):
        self.directory, self.seed, self.steps, self.console = directory, seed, steps, console
        self._stack = stack
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        self.console.print(f"[{self.seconds():5.0f} s] {text}", highlight=False, markup=False)

    def seconds(self) -> float:
        return time.monotonic() - self._started

    def log(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"

    def start(self, name: str, command: list[str], ready: bool = True) -> Background:
        """Start a service that runs until the recipe ends."""
        service = Background(command, self.log(name), self.directory / f"{name}.ready" if ready else None)
        self._stack.callback(service.stop)
        return service

    def serve(self, pool_url: str) -> tuple[str, str]:
        """Make the model and start SGLang with it and the proxy in front; return the URLs of both."""
        self.say("making a tiny model and starting SGLang")
        model = ["proxy", "tiny-model", str(self.directory / "tiny"), "--seed", str(self.seed)]
        run_command(model, self.log("model"))
        config = str(self.directory / "engine.toml")
        engine = self.start("engine", ["proxy", "engine", config, "--log", str(self.log("sglang"))]).wait_ready(400)
        serve = ["proxy", "serve", config, "--engine", engine["url"], "--pool", pool_url]
        return engine["url"], self.start("proxy", serve).wait_ready()["url"]

    def train(self, pool: Pool, pool_url: str, engine: str, gateway: str) -> None:
        """Run trainer and agents side by side until the trainer has taken its steps; print each step."""
        self.say("trainer and agents side by side")
        os.environ["OMP_NUM_THREADS"] = "1"  # the trainer shares the machine with engine and agents
        settings = {"pool": pool_url, "steps": self.steps, "push.engines": json.dumps([engine])}
        launch = ["trainer", "launch", str(self.directory / "trainer.toml")]
        launch += [f"--set={name}={value}" for name, value in settings.items()]
        run = ["harness", "run", str(self.directory / "run.toml"), "--run-dir", str(self.directory / "runs" / RUN)]
        run += ["--proxy", gateway, "--pool", pool_url, "--seed", str(self.seed), "--until-step", str(self.steps)]
        both = [self.start("trainer", launch, ready=False), self.start("harness", run, ready=False)]
        steps: StepTable | None = None
        while any(service.running() for service in both):
            time.sleep(0.5)
            for service in both:
                service.check()
            if steps is None and _has_run(pool):
                steps = StepTable(pool, RUN, self.console)
            if steps is not None:
                steps.update()


def _has_run(pool: Pool) -> bool:
    try:
        find_run(pool, RUN)
    except UserError:  # neither trainer nor harness has opened it yet
        return False
    return True


def no_run(pool: Pool) -> Pool:
    """Return the pool. SystemExit when it holds the recipe's run, with which trainer and harness would go on."""
    if _has_run(pool):
        raise SystemExit(f"error: {pool.name} already holds a run {RUN!r}; name an empty database with --pool")
    return pool


def missing(pool_url: str | None) -> Iterator[str]:
    """Yield what this machine lacks, each with the command that brings it."""
    if find_spec("sglang") is None or find_spec("megatron") is None or find_spec("psycopg") is None:
        yield "SGLang, Megatron-core or psycopg is not installed; run: make install"
    for name in AGENTS:
        try:
            INSTALLED[name].check()
        except UserError as error:
            yield str(error)
    asked = shutil.which("docker") and subprocess.run(["docker", "version"], capture_output=True)
    if not asked or asked.returncode:
        yield "no Docker daemon answers; install one (apt-get install docker.io) and start it"
    if pool_url is not None and not pool_url.startswith("postgres"):
        yield f"--pool {pool_url} is no address of a PostgreSQL database; write postgresql://USER@HOST/NAME"
    if pool_url is None and binaries() is None:
        yield "PostgreSQL is not installed; apt-get install postgresql, or name an empty database with --pool"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--pool", metavar="URL", help="an empty PostgreSQL database (default: a private server)")
    options = parser.parse_args()
    if lacks := list(missing(options.pool)):
        raise SystemExit("\n".join(f"error: {text}" for text in lacks))
    directory = options.directory.absolute()
    clear(directory, MARK)
    shutil.copytree(FILES, directory, dirs_exist_ok=True)
    (directory / "logs").mkdir()
    console, load = Console(), os.getloadavg()[0]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the private database is removed
    with ExitStack() as stack:
        recipe = Recipe(directory, options.seed, options.steps, stack, console)
        programs = binaries()
        if options.pool is None and programs is not None:
            recipe.say("starting PostgreSQL")
            options.pool = stack.enter_context(private_database(programs, recipe.log("postgres")))
        pool = no_run(stack.enter_context(closing(open_pool(options.pool))))
        engine, gateway = recipe.serve(options.pool)
        recipe.train(pool, options.pool, engine, gateway)
        recipe.say("reading the report from the pool")
        figures = report(pool, directory, engine, gateway)
        figures |= {"seconds": round(recipe.seconds()), "load_average": load, "seed": options.seed}
        figures |= {
            "command": f"examples/everything/run.py {directory.name} --seed {options.seed} --steps {options.steps}"
        }
    (directory / "report.json").write_text(json.dumps(figures, indent=2) + "\n")
    console.print(table(figures), highlight=False, soft_wrap=True)
    if lacks := absent(figures):
        raise SystemExit(f"error: these parts did not take part: {', '.join(lacks)}; see {directory / 'logs'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
