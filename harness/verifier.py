"""The verdict on what an agent left behind.

Exit 0 is reward 1, exit 1 is reward 0. A number that the verifier wrote to $REWARD_FILE overrides exit 0. Anything else
(another exit code, a limit, no number) is no verdict: the reward is missing, never 0.
"""

import math
import secrets

from harness.tasks import Task
from proxy.pool.failures import FAILURES
from sandboxes.base import Limits, Sandbox


class Failed(Exception):
    """An attempt came to no verdict."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = FAILURES[kind].kind
        self.detail = detail


def limits_of(task: Task, seconds: float) -> Limits:
    """The task's limits for a command that may take this long."""
    return Limits(
        seconds=seconds,
        cpu_seconds=task.limits.cpu_seconds,
        output_bytes=task.limits.output_kb << 10,
    )


async def verify(sandbox: Sandbox, task: Task) -> float:
    """Bring the verifier in and take its reward. Call it when nothing of the agent runs any more."""
    for path, text in task.verifier.files.items():
        await sandbox.write(path, text)
    name = f"reward-{secrets.token_hex(8)}"  # new to the agent, so that none can lie there already
    env = task.env | {"REWARD_FILE": f"{sandbox.home}/{name}"}
    result = await sandbox.run(task.verifier.command, limits_of(task, task.verifier.timeout), env)
    if result.ended != "exit":
        raise Failed("verifier", f"ended by its {result.ended} limit after {result.seconds:.1f} s")
    if result.exit_code not in (0, 1):
        raise Failed(
            "verifier", f"exit code {result.exit_code}, which is neither 0 nor 1: {result.output[-300:].strip()}"
        )
    given = await sandbox.read(f"~/{name}", limit=1000)
    if result.exit_code == 1 or given is None:
        return 1.0 - result.exit_code
    return _number(given)


def _number(text: bytes) -> float:
    try:
        reward = float(text)
    except ValueError:
        reward = math.nan
    if not math.isfinite(reward):
        raise Failed("verifier", f"$REWARD_FILE holds no finite number: {text[:80]!r}")
    return reward
