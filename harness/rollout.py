"""One rollout: attempts until one comes to an outcome, each with a fresh sandbox and a key of its own.

A failed rollout is data: its classified failure goes into its row. What no rollout could survive (an agent that is not
installed, a proxy that is gone, a pool that refuses writes) ends the run instead, and the rollout stays open.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from sqlalchemy import select

from harness.agents.base import Agent, Endpoint
from harness.agents.install import bundle_at
from harness.rewards import Verdict, below, joined
from harness.tasks import Task, parts_of
from harness.verifier import Failed, limits_of, verify
from proxy.pool.attempts import Attempt, Ending, close_attempt, open_attempt
from proxy.pool.database import Pool
from proxy.pool.errors import PoolError, UserError
from proxy.pool.failures import treatment
from proxy.pool.groups import OpenRollout, Outcome, finish_rollout
from proxy.pool.schema import completions
from sandboxes.base import Image, Result, Sandbox, Sandboxes, Spec

TRIES = 3
LIMIT_FAILURES = {"timeout": "agent_timeout", "cpu": "agent_timeout", "memory": "agent_memory"}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every rollout of a run shares."""

    pool: Pool
    sandboxes: Sandboxes
    agent: Agent
    url: str
    """Base URL of the model, ending in /v1."""
    model: str
    context_length: int
    logs: Path
    trouble: Callable[[], Awaitable[Failed | None]]
    """Asks the proxy whether it or its engine is out of order."""
    pause_seconds: float = 1.0
    """Before the first retry; four times as long before each further one."""


@dataclass
class _Account:
    """What is known of an attempt so far, for its ending."""

    stage: str = "sandbox_start"
    """The failure that an unexpected error would be now."""
    exit_code: int | None = None
    timings: dict[str, float] = field(default_factory=dict)

    def spent(self, on: str, seconds: float) -> None:
        """Add to a timing; a task with steps does everything several times."""
        self.timings[on] = self.timings.get(on, 0.0) + seconds


async def run_rollout(bench: Bench, rollout: OpenRollout) -> Outcome:
    """Bring a rollout to its outcome and write it. UserError when no rollout could succeed at present."""
    task = msgspec.convert(rollout.task, Task)
    for number in range(TRIES):
        if number:
            await asyncio.sleep(bench.pause_seconds * 4 ** (number - 1))
        outcome = await attempt(bench, rollout, task)
        if outcome.failure is None or treatment(outcome.failure) != "retry":
            break
    if outcome.failure in ("proxy", "engine") and (now := await bench.trouble()):
        raise UserError(f"{now.detail}; bring it back and repeat the same command to go on")
    finish_rollout(bench.pool, rollout.rollout_id, outcome)
    return outcome


async def attempt(bench: Bench, rollout: OpenRollout, task: Task) -> Outcome:
    """One try: open it, let the agent work, verify, and close it whatever happens."""
    opened, key = open_attempt(bench.pool, rollout.rollout_id, bench.agent.name)
    account = _Account()
    failure: str | None = "interrupted"
    detail = "the run was stopped while the attempt ran"
    try:
        verdict, failure, detail = await _work(bench, opened, key, task, account)
        return _outcome(opened, verdict, failure, detail)
    except Failed as failed:
        failure, detail = failed.kind, failed.detail
    except UserError as error:  # the agent is not there, so no rollout can succeed
        failure, detail = "agent_missing", str(error)
        raise
    except PoolError:
        raise
    except Exception as error:  # a failed rollout is a row: whatever broke is classified by the stage it broke in
        failure, detail = account.stage, f"{type(error).__name__}: {error}"
    finally:
        ending = Ending(failure=failure, detail=detail, exit_code=account.exit_code, timings=account.timings)
        close_attempt(bench.pool, opened.id, ending)
    return _outcome(opened, None, failure, detail)


def _outcome(opened: Attempt, verdict: Verdict | None, failure: str | None, detail: str) -> Outcome:
    if verdict is None:
        return Outcome(attempt_id=opened.id, reward=None, failure=failure, detail=detail, reward_parts={})
    parts = {"verifier": verdict.reward, **verdict.parts}
    return Outcome(attempt_id=opened.id, reward=verdict.reward, failure=failure, detail=detail, reward_parts=parts)


async def _work(
    bench: Bench, opened: Attempt, key: str, task: Task, account: _Account
) -> tuple[Verdict, str | None, str]:
    """Each part in one sandbox: the verdict, with the limit that ended an agent if one did."""
    began = time.monotonic()
    judged: list[tuple[str, Verdict]] = []
    remark: tuple[str | None, str] = (None, "")
    sandbox = await bench.sandboxes.start(replace(spec_of(task), agent=bench.agent.bundle))
    try:
        for part in parts_of(task):
            verdict, failure, detail = await _part(bench, opened, key, part.task, sandbox, account)
            judged.append((part.name, verdict))
            remark = remark if remark[0] else (failure, detail)
            if below(verdict, part.min_reward):
                break
        account.timings["total"] = time.monotonic() - began
        return (joined(judged, task.steps_reward) if task.steps else verdict), *remark
    finally:
        await sandbox.stop()


async def _part(
    bench: Bench, opened: Attempt, key: str, task: Task, sandbox: Sandbox, account: _Account
) -> tuple[Verdict, str | None, str]:
    """Set up, agent, end, verify."""
    began, account.stage = time.monotonic(), "sandbox_start"
    await _set_up(sandbox, task)
    account.spent("setup", time.monotonic() - began)
    account.stage = "harness"
    endpoint = Endpoint(bench.url, key, bench.model, bench.context_length)
    result = await _run_agent(bench.agent, sandbox, task, endpoint)
    account.spent("agent", result.seconds)
    account.exit_code = result.exit_code
    with (bench.logs / f"attempt-{opened.id}.log").open("a") as log:
        log.write(result.output)
    await sandbox.end_processes()
    failure = await _judge(bench, opened.id, result)
    account.stage = "verifier"
    verdict = await verify(sandbox, task)
    return verdict, failure, f"the agent was ended by its {result.ended} limit" if failure else ""


def spec_of(task: Task) -> Spec:
    """The sandbox that a task asks for."""
    limits, image = task.limits, None
    if task.image is not None:
        context = Path(task.image.directory) if task.image.directory else None
        image = Image(name=task.image.name, context=context, dockerfile=task.image.dockerfile)
    return Spec(
        image=image,
        profile=task.profile,
        network=task.network,
        work=task.work or None,
        memory_mb=limits.memory_mb,
        cpus=limits.cpus,
        pids=limits.pids,
        disk_mb=limits.disk_mb,
        env=task.env,
    )


async def _set_up(sandbox: Sandbox, task: Task) -> None:
    for path, text in task.files.items():
        await sandbox.write(path, text)
    for path, source in task.directories.items():
        await sandbox.put(Path(source), path)
    if task.setup:
        result = await sandbox.run(task.setup, limits_of(task, task.setup_timeout), task.env)
        if result.ended != "exit" or result.exit_code:
            how = f"exit code {result.exit_code}" if result.ended == "exit" else f"its {result.ended} limit"
            raise Failed("sandbox_start", f"set-up ended by {how}: {result.output[-300:].strip()}")
    if task.daemons:
        await sandbox.keep_processes()


async def _run_agent(agent: Agent, sandbox: Sandbox, task: Task, endpoint: Endpoint) -> Result:
    launch = agent.launch(endpoint, bundle_at(sandbox.bundles, agent.bundle or ""))
    await sandbox.write("~/instruction.md", task.instruction)
    for path, text in launch.files.items():
        await sandbox.write(path, text)
    told = {"OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": endpoint.key, "MODEL": endpoint.model}
    told |= {"INSTRUCTION": task.instruction, "INSTRUCTION_FILE": f"{sandbox.home}/instruction.md"}
    return await sandbox.run(launch.command, limits_of(task, task.timeout), task.env | launch.env | told)


async def _judge(bench: Bench, attempt_id: int, result: Result) -> str | None:
    """The policy's own failure or None; raises Failed when the attempt says nothing about the policy."""
    query = select(completions.c.finish_reason).where(completions.c.attempt_id == attempt_id)
    with bench.pool.read() as connection:
        calls = connection.scalars(query.order_by(completions.c.ordinal)).all()
    completed = sum(call not in ("error", "abort") for call in calls)
    if result.ended == "exit" and result.exit_code == 127 and not calls:
        raise UserError(f"the agent's command was not found ({result.output[-200:].strip()}); install it or correct it")
    if not completed or result.exit_code:
        if calls and calls[-1] == "error":
            raise Failed("engine", "the engine broke off the last model call, and the agent gave up")
        if trouble := await bench.trouble():
            raise trouble
    if not completed:
        how = f"exit code {result.exit_code}" if result.ended == "exit" else f"its {result.ended} limit"
        raise Failed("agent_crash", f"{how} without a completed model call: {result.output[-300:].strip()}")
    return LIMIT_FAILURES.get(result.ended)
