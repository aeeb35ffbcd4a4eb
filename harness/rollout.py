"""One rollout: attempts until one comes to an outcome, each with a fresh sandbox and a key of its own.

A failed rollout is data: its classified failure goes into its row (proxy/pool/rollouts/failures.py). What no rollout
could survive (an agent that is not installed, a proxy that is gone, a pool that refuses writes) ends the run instead,
and the rollout stays open. Nothing here blocks the event loop: other attempts go on meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from harness.agents.base import Agent, Endpoint
from harness.agents.install import bundle_at
from harness.agents.one_call import ask
from harness.async_pool import Books
from harness.environment.augment import Variation, apply, chosen
from harness.environment.snapshot import keep_ground, lay, set_up, spec_of
from harness.failure import AttemptFailed
from harness.monitor.hang_watch import Watched, run_watched
from harness.tasks import Part, Task, parts_of
from harness.tasks.verdict_options import Augment
from harness.verdict.checkers import Checking, check_answer
from harness.verdict.isolation import apart, end_agent, keep_findings
from harness.verdict.judge import Judge
from harness.verdict.rewards import Verdict, below, joined
from harness.verdict.verifier import verify
from proxy.pool.errors import PoolError, UserError
from proxy.pool.rollouts.attempts import Attempt, Ending, close_attempt, open_attempt
from proxy.pool.rollouts.budgets import UNLIMITED, Budget, seen
from proxy.pool.rollouts.failures import treatment
from proxy.pool.rollouts.groups import Finished, OpenRollout, Outcome, finish_rollout
from sandboxes.base import ImageError, Result, Sandbox, SandboxError, Sandboxes

TRIES = 3
VERIFIER_TRIES = 2
LIMITS = {"timeout": "agent_budget", "cpu": "agent_budget", "memory": "agent_memory"}


class Lanes:
    """How many attempts of a run may be at each kind of work at a time."""

    def __init__(self, *, starting: int, agents: int, verifying: int):
        self.starting = asyncio.Semaphore(starting)
        self.agents = asyncio.Semaphore(agents)
        self.verifying = asyncio.Semaphore(verifying)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """What a run gives each attempt, at most; a task may give less."""

    seconds: float | None = None
    turns: int | None = None
    tokens: int | None = None
    hung_seconds: float = 3600
    """Without a model call that ends and without output of the agent, before it counts as hung."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What every rollout of a run shares."""

    books: Books
    sandboxes: Sandboxes
    agent: Agent
    """Of the rollout at hand, where a run has several."""
    url: str
    """Base URL of the model, ending in /v1."""
    model: str
    context_length: int
    logs: Path
    trouble: Callable[[], Awaitable[AttemptFailed | None]]
    """Asks the proxy whether it or its engine is out of order."""
    lanes: Lanes = field(default_factory=lambda: Lanes(starting=64, agents=64, verifying=64))
    budgets: Budgets = Budgets()
    judge: Judge | None = None
    """Grades answers where a task's checker is a judge."""
    pause_seconds: float = 1.0
    """Before the first retry; four times as long before each further one."""
    augment: Augment | None = None
    """What varies in the environments of tasks that do not say so themselves."""
    seed: int = 0
    """Of what varies."""
    elsewhere: "Callable[[Bench, OpenRollout, Task, Fate], Awaitable[Outcome]] | None" = None
    """Makes an attempt on another machine, as `attempt` does here (`--executor ray`)."""


@dataclass
class Fate:
    """Why a rollout is cancelled, when it is not because the run ends."""

    called_off: str | None = None
    """redundant or filtered."""


@dataclass
class _Account:
    """What is known of an attempt so far, for its ending."""

    stage: str = "sandbox_start"
    """The failure that an unexpected error would be now."""
    exit_code: int | None = None
    timings: dict[str, float] = field(default_factory=dict)
    wanted: list[Variation] | None = None
    """Variations of the environment that are still to be applied."""
    augmentation: list[str] = field(default_factory=list)
    """Those that were."""
    env: dict[str, str] = field(default_factory=dict)
    """What they give the agent."""
    remark: str = ""
    """What ended the agent, if a limit did: why its sandbox may be broken."""

    def explained(self, detail: str) -> str:
        return f"{detail} ({self.remark})" if self.remark else detail

    def spent(self, on: str, seconds: float) -> None:
        """Add to a timing; a task with steps does everything several times."""
        self.timings[on] = self.timings.get(on, 0.0) + seconds


async def run_rollout(bench: Bench, rollout: OpenRollout, fate: Fate | None = None) -> tuple[Outcome, Finished]:
    """Bring a rollout to its outcome and write it. UserError when no rollout could succeed at present."""
    task, fate = msgspec.convert(rollout.task, Task), fate or Fate()
    for number in range(TRIES):
        if number:
            await asyncio.sleep(bench.pause_seconds * 4 ** (number - 1))
        make = bench.elsewhere or attempt
        outcome = await make(bench, rollout, task, fate)
        if outcome.failure is None or treatment(outcome.failure) != "retry":
            break
    if outcome.failure in ("proxy", "engine") and (now := await bench.trouble()):
        raise UserError(f"{now.detail}; bring it back and repeat the same command to go on")
    return outcome, await bench.books(finish_rollout, rollout.rollout_id, outcome)


async def attempt(bench: Bench, rollout: OpenRollout, task: Task, fate: Fate) -> Outcome:
    """One try: open it, let the agent work, verify, and close it whatever happens."""
    budget = _budget(task, bench.budgets)
    agent = rollout.agent or bench.agent.name
    opened, key = await bench.books(open_attempt, rollout.rollout_id, agent, budget)
    account = _Account(wanted=_variations(bench, rollout, task))
    failure: str | None = "interrupted"
    detail = "the run was stopped while the attempt ran"
    try:
        verdict, failure, detail = await _work(bench, opened, key, task, account)
        return _outcome(opened, verdict, failure, detail)
    except AttemptFailed as failed:
        failure = failed.kind
        detail = account.explained(failed.detail) if failure == "verifier" else failed.detail
    except ImageError as error:
        failure, detail = "image", str(error)
    except UserError as error:  # the agent is not there, so no rollout can succeed
        failure, detail = "agent_missing", str(error)
        raise
    except PoolError:
        raise
    except asyncio.CancelledError:
        if fate.called_off is not None:
            failure, detail = fate.called_off, "the attempt was called off while it ran"
        raise
    except Exception as error:  # a failed rollout is a row: whatever broke is classified by the stage it broke in
        failure, detail = account.stage, account.explained(f"{type(error).__name__}: {error}")
    finally:
        ending = Ending(
            failure=failure,
            detail=detail,
            exit_code=account.exit_code,
            timings=account.timings,
            augmentation=account.augmentation,
        )
        await bench.books(close_attempt, opened.id, ending)
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
    if task.domain != "agent":
        return await _answer(bench, opened, key, task, account)
    began = time.monotonic()
    judged: list[tuple[str, Verdict]] = []
    remark: tuple[str | None, str] = (None, "")
    async with bench.lanes.starting:
        sandbox = await bench.sandboxes.start(replace(spec_of(task), agent=bench.agent.bundle))
    try:
        for part in parts_of(task):
            verdict, failure, detail = await _part(bench, opened, key, part, sandbox, account)
            judged.append((part.name, verdict))
            remark = remark if remark[0] else (failure, detail)
            if below(verdict, part.min_reward):
                break
        account.timings["total"] = time.monotonic() - began
        return (joined(judged, task.steps_reward) if task.steps else verdict), *remark
    finally:
        await sandbox.stop()


async def _answer(
    bench: Bench, opened: Attempt, key: str, task: Task, account: _Account
) -> tuple[Verdict, str | None, str]:
    """One model call, and the verdict on what it says."""
    account.stage = "harness"
    endpoint = Endpoint(bench.url, key, bench.model, bench.context_length)
    async with bench.lanes.agents:
        result = await ask(endpoint, task, min(task.timeout, bench.budgets.seconds or task.timeout))
    account.spent("agent", result.seconds)
    account.exit_code = result.exit_code
    (bench.logs / f"attempt-{opened.id}.log").write_text(result.output)
    if result.ended == "exit":
        failure, detail = await _judge(bench, opened.id, result, task)
    elif trouble := await bench.trouble():
        raise trouble
    else:
        failure, detail = "agent_budget", "the model had not answered when the time was up"
    account.stage = "verifier"
    async with bench.lanes.verifying:
        return await check_answer(task, result.output, Checking(bench.sandboxes, bench.judge)), failure, detail


async def _part(
    bench: Bench, opened: Attempt, key: str, part: Part, sandbox: Sandbox, account: _Account
) -> tuple[Verdict, str | None, str]:
    """Set up, agent, end, verify."""
    task, name = part.task, f"attempt-{opened.id}"
    began, account.stage = time.monotonic(), "sandbox_start"
    async with bench.lanes.starting:
        await set_up(sandbox, task)
        if account.wanted:  # once, and not for every step
            account.augmentation, account.env = await apply(sandbox, task, account.wanted)
            account.wanted = None
        ground = await lay(sandbox, task, bench.sandboxes)
    account.spent("setup", time.monotonic() - began)
    account.stage = "harness"
    await asyncio.to_thread(keep_ground, bench.logs, name, ground)  # a whole root's files take a while to write
    varied = msgspec.structs.replace(task, env=task.env | account.env)
    result = await _run_agent(bench, sandbox, varied, opened, key)
    account.spent("agent", result.seconds)
    account.exit_code = result.exit_code
    with (bench.logs / f"{name}.log").open("a") as log:
        log.write(result.output)
    account.stage, account.remark = "verifier", _ended_by(result)  # what breaks now may be the agent's doing: no retry
    await end_agent(sandbox, task, ground)
    failure, detail = await _judge(bench, opened.id, result, task)
    async with (
        bench.lanes.verifying,
        apart(bench.sandboxes, sandbox, task, ground, part.more) as (room, found),
    ):
        await asyncio.to_thread(keep_findings, bench.logs, name, found)
        return await _verdict(room, task), failure, detail


async def _run_agent(bench: Bench, sandbox: Sandbox, task: Task, opened: Attempt, key: str) -> Result:
    url = f"{sandbox.model_url}/v1" if sandbox.model_url else bench.url
    endpoint = Endpoint(url, key, bench.model, bench.context_length)
    launch = bench.agent.launch(endpoint, bundle_at(sandbox.bundles, bench.agent.bundle or ""))
    async with bench.lanes.agents:
        await sandbox.write("~/instruction.md", task.instruction)
        for path, text in launch.files.items():
            await sandbox.write(path, text)
        told = {"OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": endpoint.key, "MODEL": endpoint.model}
        told |= {"INSTRUCTION": task.instruction, "INSTRUCTION_FILE": f"{sandbox.home}/instruction.md"}
        limits = task.command_limits(min(task.timeout, bench.budgets.seconds or task.timeout))
        env, patience = task.env | launch.env | told, bench.budgets.hung_seconds
        try:
            return await run_watched(sandbox, launch.command, limits, env, Watched(bench.books, opened.id, patience))
        except SandboxError as error:
            raise AttemptFailed("tool_flake", str(error)) from error


def _variations(bench: Bench, rollout: OpenRollout, task: Task) -> list[Variation]:
    """What is otherwise in this rollout's environment, in each of its attempts."""
    augment = task.augment or bench.augment
    if augment is None:
        return []
    member = "" if augment.per == "group" else rollout.member
    return chosen(augment, bench.seed, task.id, f"{rollout.group_id}/{member}")


def _budget(task: Task, given: Budgets) -> Budget:
    """The smaller of what the task and the run allow."""
    turns = [number for number in (task.max_turns, given.turns) if number is not None]
    tokens = [number for number in (task.max_tokens, given.tokens) if number is not None]
    return Budget(turns=min(turns, default=None), tokens=min(tokens, default=None)) if turns or tokens else UNLIMITED


async def _judge(bench: Bench, attempt_id: int, result: Result, task: Task) -> tuple[str | None, str]:
    """The policy's own failure, if any, with its detail; raises AttemptFailed when the attempt says nothing about the
    policy.

    By what the proxy saw, not by the exit code: agents end with 0 when the model failed them, and with 1 when they are
    done.
    """
    saw = await bench.books(seen, attempt_id)
    if result.ended == "exit" and result.exit_code == 127 and not saw.completed and not saw.broken:
        said = result.output[-200:].strip()
        if task.image is not None:  # of this task, so the run's other tasks may well go on
            raise AttemptFailed("image", f"the agent cannot be started in the task's image ({said})")
        raise UserError(f"the agent's command was not found ({said}); install it or correct it")
    if saw.broken:
        kind = "engine" if saw.broken.startswith("engine") else "proxy"
        raise AttemptFailed(kind, f"the last model call failed, and the agent gave up: {saw.broken}")
    if not saw.completed or result.exit_code:
        if trouble := await bench.trouble():
            raise trouble
    if saw.spent:
        return "agent_budget", f"it used up its {saw.spent}"
    if not saw.completed:
        how = f"exit code {result.exit_code}" if result.ended == "exit" else f"its {result.ended} limit"
        raise AttemptFailed("agent_crash", f"{how} without a completed model call: {result.output[-300:].strip()}")
    return LIMITS.get(result.ended), _ended_by(result)


def _ended_by(result: Result) -> str:
    return f"the agent was ended by its {result.ended} limit" if result.ended in LIMITS else ""


async def _verdict(sandbox: Sandbox, task: Task) -> Verdict:
    """The verifier's verdict. One that gives none is asked once more: it may have failed by itself."""
    for past in range(VERIFIER_TRIES):
        try:
            return await verify(sandbox, task)
        except (AttemptFailed, SandboxError):
            if past + 1 == VERIFIER_TRIES:
                raise
            await sandbox.end_processes()
    raise AssertionError("the last try returns or raises")
