"""Runs a task's verifier and reads its verdict.

Exit code 0 is reward 1, exit code 1 is reward 0. A number that the verifier wrote to $REWARD_FILE overrides exit code
0. Harbor's verifiers write /logs/verifier/reward.json or reward.txt instead. Anything else (another exit code, a limit,
no number, one outside of the task's range) is no verdict: the reward is missing, never 0. Cases are in cases.py.
"""

import secrets
import shlex
from pathlib import Path

from harness.failure import AttemptFailed
from harness.tasks import Task, Verifier
from harness.verdict.cases import verify_cases
from harness.verdict.rewards import MAX_BYTES, NoReward, Verdict, from_json, from_text, within
from sandboxes.base import Limits, Result, Sandbox, User

VERIFIER_TRIES = 2
"""How often a verifier that comes to no verdict is asked: it may have failed by itself."""
LOGS = "/logs/verifier"
"""Where Harbor's verifiers write their rewards."""


async def verify(sandbox: Sandbox, task: Task) -> Verdict:
    """Copy the verifier into its sandbox (isolation.py), run it, and read its verdict.

    AttemptFailed("verifier") when there is none.
    """
    await _copy_in(sandbox, task.verifier)
    if task.verifier.cases:
        return await verify_cases(sandbox, task)
    name = f"reward-{secrets.token_hex(8)}"  # random, so that the agent cannot have put a file there
    env = task.verifier_env() | {"REWARD_FILE": f"{sandbox.home}/{name}"}
    result = await sandbox.run(
        task.verifier.command, task.command_limits(task.verifier.timeout), env, user=task.verifier.user
    )
    if result.ended != "exit":
        raise AttemptFailed("verifier", f"ended by its {result.ended} limit after {result.seconds:.1f} s")
    try:
        if task.verifier.rewards == "logs":
            return within(task.verifier.range, await _from_logs(sandbox, result))
        return within(task.verifier.range, await _from_exit(sandbox, result, f"~/{name}"))
    except NoReward as error:
        raise AttemptFailed("verifier", str(error)) from error


def user_of(verifier: Verifier) -> User:
    """Who runs the verifier: cases are run as the agent's user."""
    return "agent" if verifier.cases else verifier.user


async def _copy_in(sandbox: Sandbox, verifier: Verifier) -> None:
    """Replace whatever lies where the verifier's files belong, and empty the directory for its rewards."""
    absolute = [path for path in verifier.directories if path.startswith("/")]
    if verifier.rewards == "logs":
        absolute.append(LOGS)
    if absolute and not sandbox.own_root:  # this machine's directories are not the task's to empty
        raise AttemptFailed("verifier", f"{absolute[0]} is this machine's in such a sandbox; use Docker")
    if absolute:
        places = " ".join(map(shlex.quote, absolute))
        result = await sandbox.run(
            f"rm -rf {places} && mkdir -p {places}", Limits(seconds=60), {}, user=user_of(verifier)
        )
        if result.exit_code:
            raise AttemptFailed("verifier", f"{places} cannot be emptied: {result.output[-300:].strip()}")
    for path, source in verifier.directories.items():
        await sandbox.put(Path(source), path, user=user_of(verifier))
    for path, text in verifier.files.items():
        await sandbox.write(path, text, user=user_of(verifier))


async def _from_exit(sandbox: Sandbox, result: Result, path: str) -> Verdict:
    if result.exit_code not in (0, 1):
        raise NoReward(f"exit code {result.exit_code}, which is neither 0 nor 1: {result.output[-300:].strip()}")
    content = await sandbox.read(path, limit=MAX_BYTES)
    if result.exit_code == 1 or content is None:
        return Verdict(1.0 - result.exit_code)
    return from_text(content, "$REWARD_FILE")


async def _from_logs(sandbox: Sandbox, result: Result) -> Verdict:
    """Read rewards as Harbor does: reward.json before reward.txt, whatever the exit code."""
    for name, read in (("reward.json", from_json), ("reward.txt", from_text)):
        content = await sandbox.read(f"{LOGS}/{name}", limit=MAX_BYTES)
        if content is not None:
            return read(content, name)
    end = result.output[-300:].strip()
    raise NoReward(f"{LOGS} holds neither reward.json nor reward.txt after exit code {result.exit_code}: {end}")
