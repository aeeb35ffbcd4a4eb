"""`harness replay`: runs a rollout's task and agent again, against the recorded answers.

It needs no engine, writes nothing to the run's pool, and reports whether the agent made the same calls and the verifier
came to the same verdict. Text that differs by nature, such as a clock, is named with `--ignore`.
"""

import argparse
import asyncio
import re
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from harness.agents.base import Agent
from harness.agents.one_call import OneCall
from harness.commands.run import make_context
from harness.rollout.attempt import make_attempt
from harness.rollout.context import RolloutJob, RunContext
from harness.run_dir import RunDir
from harness.settings import Settings
from harness.setup.placement import SandboxMaker
from harness.setup.sandbox_choice import backend_for, choose, listening
from harness.setup.stack import replaying
from harness.tasks.stored import stored_task
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.budgets import calls_seen
from proxy.pool.rollouts.groups import Outcome, open_group
from proxy.pool.rollouts.runs import find_run, open_run
from proxy.pool.terminal.progress import progress
from proxy.pool.training.finished_rollouts import ReplayableRollout, finished_rollout
from sandboxes.local.process import default_root

SANDBOXES = rf"{re.escape(str(default_root()))}/[\w-]+"
"""Directories of process sandboxes are new for every attempt, and some agents tell the model where they work."""
DIFFERENT = 1


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    replay = verbs.add_parser(
        "replay",
        help="run a rollout again, against its recorded answers",
        epilog="example: harness replay runs/mixed 17",
    )
    replay.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the run's directory")
    replay.add_argument("rollout", type=int, metavar="ROLLOUT", help="number of the rollout in results.jsonl")
    replay.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="configuration of the proxy that recorded it (default: RUN_DIR/proxy.toml)",
    )
    replay.add_argument(
        "--ignore", action="append", default=[], metavar="REGEX", help="leave matches out of the comparison of prompts"
    )
    replay.set_defaults(call=_replay)


def _replay(given: argparse.Namespace) -> int:
    """Run the attempt against its recording and print the differences; exit code 1 when there are any."""
    directory = RunDir(given.run_dir)
    where = directory.whereabouts()
    config = given.config or directory.path / "proxy.toml"
    if not config.exists():
        raise UserError(
            f"{config} does not exist, since the run used a proxy that was already running; "
            "name that proxy's configuration with --config FILE"
        )
    pool = open_pool(where.pool, create=False)
    recorded = finished_rollout(pool, find_run(pool, where.name).id, given.rollout)
    pool.close()
    with tempfile.TemporaryDirectory(prefix="replay-") as folder:
        outcome, calls = _play(recorded, directory, config, Path(folder), given.ignore)
        report = Path(folder) / "differences.jsonl"
        lines = report.read_bytes().splitlines() if report.exists() else []
        differences = [msgspec.json.decode(line) for line in lines]
    same = outcome.reward == recorded.reward
    print(
        f"attempt {recorded.attempt_id}: {calls} of {recorded.calls} calls made, {len(differences)} requests differed"
    )
    if differences:
        first = differences[0]
        print(
            f"first: request {first['request']} differs from completion {first['nearest']} {first['where']}: "
            f"{first['expected']!r} was recorded and {first['got']!r} came"
        )
    print(f"verdict: recorded {_verdict(recorded)}, now {_verdict(outcome)}: {'the same' if same else 'different'}")
    return 0 if same and not differences else DIFFERENT


def _play(
    recorded: ReplayableRollout, directory: RunDir, config: Path, folder: Path, ignored: Sequence[str]
) -> tuple[Outcome, int]:
    """Run the attempt again in a sandbox of the same kind. Returns its outcome and how many calls it made."""
    where, (_, settings) = directory.whereabouts(), directory.begun_with()
    agent = _agent(recorded, settings)
    choice = choose(directory.sandbox(), [stored_task(recorded.task)])
    with (
        listening(choice, settings) as listeners,
        replaying(
            config, recorded.attempt_id, where.pool, folder, ignored=[SANDBOXES, *ignored], listeners=listeners
        ) as proxy,
    ):
        sandboxes = SandboxMaker(backend=backend_for(choice, settings, proxy, f"replay-{recorded.attempt_id}"))()
        replay_pool = open_pool(proxy.pool)
        try:
            context = make_context(proxy, settings, pool=replay_pool, sandboxes=sandboxes, logs=folder)
            what = f"replaying attempt {recorded.attempt_id}"
            with progress(lambda: ", ".join(filter(None, (what, sandboxes.making)))):
                return asyncio.run(_attempt(context, recorded, agent))
        finally:
            replay_pool.close()


def _agent(recorded: ReplayableRollout, settings: Settings) -> Agent:
    if recorded.task.get("domain", "agent") != "agent":
        return OneCall()
    agents = {scaffold.name: scaffold.agent for scaffold in settings.scaffolds("eval")}
    if recorded.agent not in agents:
        raise UserError(f"the run has no agent {recorded.agent!r} any more, only: {', '.join(agents)}")
    return agents[recorded.agent]


async def _attempt(context: RunContext, recorded: ReplayableRollout, agent: Agent) -> tuple[Outcome, int]:
    """Make one attempt with the variations of the recorded one. Returns its outcome and how many calls it made."""

    def open_one(pool: Pool) -> Any:
        return open_group(pool, open_run(pool, "replay", "collect", {}).id, recorded.task, 1)[0]

    rollout = replace(await context.pool(open_one), group_id=recorded.group_id, member=recorded.member)
    try:
        outcome = await make_attempt(context, RolloutJob(rollout, stored_task(recorded.task), agent))
    finally:
        await context.sandboxes.close()
    assert outcome.attempt_id is not None
    return outcome, (await context.pool(calls_seen, outcome.attempt_id)).completed


def _verdict(of: ReplayableRollout | Outcome) -> str:
    reward = "no reward" if of.reward is None else f"{of.reward:g}"
    return f"{reward} ({of.failure})" if of.failure else reward
