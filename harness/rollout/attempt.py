"""One attempt at a rollout: a sandbox, the agent in it, and the verdict. It is closed whatever happens.

Nothing here blocks the event loop: other attempts go on meanwhile.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from harness.agents import mcp_forms
from harness.agents.base import Endpoint
from harness.agents.bundles.install import bundle_at
from harness.agents.one_call import ask
from harness.environment.augment import Variation, chosen
from harness.environment.snapshot import Snapshot, set_up, spec_of, take_snapshot, write_snapshot
from harness.environment.varied import Applied, vary
from harness.failure import AttemptFailed, Unexpected, stage
from harness.integrity.watch import StepEvidence, evidence_in, evidence_of_answer, findings_of
from harness.monitor.egress import note_egress
from harness.monitor.hang_watch import HangWatch, run_watched
from harness.rollout.context import Budgets, RolloutJob, RunContext
from harness.tasks import Task, TaskPart, parts_of
from harness.verdict.checkers import CheckerContext, verdict_on
from harness.verdict.findings import write_findings
from harness.verdict.fresh import gives_verdict_untouched
from harness.verdict.isolation import end_agent, verifier_sandbox
from harness.verdict.rewards import Verdict, below, joined
from harness.verdict.verifier import VERIFIER_TRIES, verify
from proxy.pool.completions.store import labelled, of_attempt
from proxy.pool.errors import PoolError, UserError
from proxy.pool.rollouts.attempts import Attempt, Ending, close_attempt, open_attempt
from proxy.pool.rollouts.budgets import UNLIMITED, Budget, calls_seen
from proxy.pool.rollouts.failures import DIFFERED
from proxy.pool.rollouts.groups import Outcome
from proxy.pool.rollouts.prompt_variations import PromptVariation, drawn
from proxy.pool.rollouts.starts import left_replay
from sandboxes.base import ImageError, Result, Sandbox, SandboxError

LIMITS = {"timeout": "agent_budget", "cpu": "agent_budget", "memory": "agent_memory"}
"""How a sandbox ends an agent -> the failure that this is."""


async def make_attempt(context: RunContext, job: RolloutJob) -> Outcome:
    """Open an attempt, run it, and close it whatever happens. Raises what ends the run, and cancellation."""
    try:
        await context.sandboxes.until_there()
        if context.engine.away:
            await context.engine.until_there()
    except SandboxError as error:
        raise UserError(f"{error}, then repeat the same command to go on") from error
    agent_name = job.rollout.agent or job.agent.name
    opening = job.rollout.rollout_id, agent_name, _budget(job, context.budgets), _prompt_variation(context, job)
    row, key = await context.pool(open_attempt, *opening)
    attempt = LiveAttempt(context, job, row, key)
    verdict: Verdict | None = None
    failure: str | None = "interrupted"
    detail = "the run was stopped while the attempt ran"
    try:
        with stage("harness"):  # the last resort: no stage of the attempt has classified the error
            verdict = await attempt.run()
        failure, detail = attempt.policy_failure.kind, attempt.policy_failure.detail
    except AttemptFailed as failed:
        failure, detail = await attempt.blamed(failed.kind, attempt.explained(failed))
    except ImageError as error:
        failure, detail = await attempt.blamed("image", str(error))
    except UserError as error:  # the agent is not there, so no rollout can succeed
        failure, detail = "agent_missing", str(error)
        raise
    except asyncio.CancelledError:
        if job.cancellation.reason is not None:
            failure, detail = job.cancellation.reason, "the attempt was called off while it ran"
        raise
    finally:
        await attempt.close_in_pool(failure, detail)
    if verdict is None:
        return Outcome(attempt_id=row.id, reward=None, failure=failure, detail=detail, reward_parts={})
    return Outcome(
        attempt_id=row.id,
        reward=verdict.reward,
        failure=failure,
        detail=detail,
        # Last, as a verifier may write a part of this name, which no range has checked.
        reward_parts={**verdict.parts, "verifier": verdict.reward},
        integrity=await attempt.integrity(),
    )


@dataclass(frozen=True)
class PolicyFailure:
    """A failure that is the policy's own doing, such as a used-up budget; the verifier's verdict still counts."""

    kind: str | None = None
    """None: there is none."""
    detail: str = ""


class LiveAttempt:
    """An attempt while it runs: its sandbox, and what is known of it so far for its row in the pool.

    A task with steps does `set_up`, `run_agent` and `verify` once for each of them, in one sandbox. An error that no
    code has classified gets the failure of the stage in which it was raised.
    """

    def __init__(self, context: RunContext, job: RolloutJob, row: Attempt, key: str):
        self._context, self._job, self._row, self._id, self._key = context, job, row, row.id, key
        self._log_name = f"attempt-{row.id}"
        self._sandbox: Sandbox | None = None
        self._began = time.monotonic()
        self._variations = _variations(context, job)
        """Variations of the environment that are still to be applied: once, not for every step."""
        self._applied = Applied()
        self._may_have_calls = False
        """Whether the agent may have left calls that go on at the proxy."""
        self._ended_by = ""
        """The limit that ended the agent, if one did: why its sandbox may be broken."""
        self._exit_code: int | None = None
        self._worked: Snapshot | None = None
        """The snapshot before the last agent that has worked in the sandbox. None: none has."""
        self._completed = 0
        """Complete model calls of the steps before this one."""
        self._timings: dict[str, float] = {}
        self._augmentation: list[str] = row.variation.lines() if row.variation else []
        self._evidence: list[StepEvidence] = []
        """The evidence of each verified step, where somebody looks."""
        self._written: set[str] = set()
        """Absolute paths of files that the harness itself writes after the snapshot."""
        self.policy_failure = PolicyFailure()
        """The first step's that has one."""

    async def run(self) -> Verdict:
        """The verdict. AttemptFailed, or ImageError, when there is none."""
        if self._job.task.domain != "agent":
            return await self._answer()
        began = time.monotonic()
        verdicts: list[tuple[str, Verdict]] = []
        failed: AttemptFailed | None = None
        try:
            with stage("sandbox_start"):
                sandbox = await self._start()
            for part in parts_of(self._job.task):
                async with self._preparing("sandbox_start", sandbox, part):
                    snapshot = await self.set_up(sandbox, part.task)
                with stage("harness"):
                    result = await self.run_agent(sandbox, part, snapshot)
                with stage("verifier"):  # what breaks now may be the agent's doing: no retry
                    verdict = await self.verify(sandbox, part, snapshot, result)
                verdicts.append((part.name, verdict))
                if below(verdict, part.min_reward):
                    break
            self._timings["total"] = time.monotonic() - began
            return joined(verdicts, self._job.task.steps_reward) if self._job.task.steps else verdict
        except AttemptFailed as error:
            failed = error
            raise
        finally:
            await self.close(failed)

    async def blamed(self, kind: str, detail: str) -> tuple[str, str]:
        """Return the failure and its detail: an outage where its sandbox or every engine was away meanwhile."""
        if kind == "engine" and await self._context.engine.was_away(self._began):
            return "outage", f"no engine was up ({detail})"
        if kind in ("engine", "proxy") or not await self._context.sandboxes.was_away(self._began, self._sandbox):
            return kind, detail
        return "outage", f"what runs the sandboxes was away ({detail})"

    async def _start(self) -> Sandbox:
        spec = replace(spec_of(self._job.task), agent=self._job.agent.bundle)
        async with self._context.slots.starting:
            self._sandbox = await self._context.sandboxes.start(spec)
        if spec.network == "full":
            await self._note_egress("agent")
        return self._sandbox

    async def _note_egress(self, who: str) -> None:
        await note_egress(self._context.pool, self._row, who, self._job.task, self._context.sandboxes.kind)

    @asynccontextmanager
    async def _preparing(self, kind: str, sandbox: Sandbox, part: TaskPart) -> AsyncIterator[None]:
        """Give an error this kind, with which an attempt is tried again. Where an agent has worked it gets another.

        That agent may have broken what fails now, and would get a second try: AttemptFailed("verifier") or "spoiled".
        """
        try:
            with stage(kind):
                yield
        except AttemptFailed as error:
            if self._worked is None or error.kind != kind:
                raise
            why = AttemptFailed("verifier", f"a step cannot begin where an agent has worked: {error.detail}")
            with stage("verifier"):
                await self._look_untouched(sandbox, part, self._worked, why)
            raise why from error

    async def set_up(self, sandbox: Sandbox, task: Task) -> Snapshot:
        """Prepare the sandbox for the agent, and remember it as the agent finds it."""
        began = time.monotonic()
        async with self._context.slots.starting:
            await set_up(sandbox, task)
            if self._variations:
                kind = self._context.sandboxes.kind
                self._applied = await vary(sandbox, self._job.task, kind, self._variations)
                self._augmentation += self._applied.names
                self._variations = []
            looks, varied = self._context.integrity is not None, self._applied.files
            snapshot = await take_snapshot(sandbox, task, self._context.sandboxes, varied, evidence=looks)
        self._add_time("setup", time.monotonic() - began)
        return snapshot

    async def run_agent(self, sandbox: Sandbox, part: TaskPart, snapshot: Snapshot) -> Result:
        """Let the agent work until it ends or a limit ends it. AttemptFailed when it hung or lost its sandbox."""
        context, task, self._may_have_calls = self._context, part.task, True
        await asyncio.to_thread(write_snapshot, context.logs, self._log_name, snapshot)  # many files: a while to write
        url = f"{sandbox.model_url}/v1" if sandbox.model_url else context.url
        endpoint = Endpoint(url, self._key, context.model, context.context_length)
        launch = self._job.agent.launch(endpoint, bundle_at(sandbox.bundles, self._job.agent.bundle or ""), task.mcp)
        env = task.env | dict(self._applied.env) | launch.env
        env |= {"OPENAI_BASE_URL": endpoint.url, "OPENAI_API_KEY": endpoint.key, "MODEL": endpoint.model}
        env |= {"INSTRUCTION": task.instruction, "INSTRUCTION_FILE": f"{sandbox.home}/instruction.md"}
        env |= {"MCP_FILE": f"{sandbox.home}/{mcp_forms.FILE}"} if task.mcp else {}
        limits = task.command_limits(min(task.timeout, context.budgets.seconds or task.timeout))
        excused = partial(context.engine.stood_still, self._id)
        watched = HangWatch(
            context.pool, self._id, context.budgets.hung_seconds, lambda: context.sandboxes.away_seconds, excused,
            limited=bool(_budget(self._job, context.budgets) or self._job.rollout.start),
        )  # fmt: skip
        async with context.slots.agents:
            files = {"~/instruction.md": task.instruction, **launch.files}
            files |= {f"~/{mcp_forms.FILE}": mcp_forms.file_text(task.mcp)} if task.mcp else {}
            async with self._preparing("harness", sandbox, part):
                for path, text in files.items():
                    await sandbox.write(path, text)
                    self._written.add(path.replace("~", sandbox.home, 1) if path.startswith("~/") else path)
            self._worked = snapshot
            began_at = time.time()  # unix time, which the proxy compares with its own
            limits = replace(limits, excused=partial(excused, began_at))
            with stage("tool_flake"):  # what breaks now may be the agent's doing: no retry
                try:
                    result = await run_watched(sandbox, launch.command, limits, env, watched)
                except SandboxError as error:
                    raise AttemptFailed("tool_flake", str(error)) from error
        await self._add_agent_time(result, began_at)
        self._exit_code = result.exit_code
        with (context.logs / f"{self._log_name}.log").open("a") as log:
            log.write(result.output)
        self._ended_by = _limit_text(result)
        return result

    async def verify(self, sandbox: Sandbox, part: TaskPart, snapshot: Snapshot, result: Result) -> Verdict:
        """End the agent, say whether its end is a failure of the policy's, and take the verifier's verdict.

        AttemptFailed("spoiled") when there is none and the verifier comes to one where no agent was.
        """
        try:
            await end_agent(sandbox, part.task, snapshot)
            await self._end_calls()
            await self._classify_end(result, part.task)
            return await self._verified(sandbox, part, snapshot)
        except (ImageError, UserError, PoolError):
            raise
        except Exception as error:  # whatever it is, the agent may have brought it about
            if not isinstance(error, AttemptFailed) or error.kind == "verifier":
                await self._look_untouched(sandbox, part, snapshot, error)
            raise

    async def _look_untouched(self, sandbox: Sandbox, part: TaskPart, snapshot: Snapshot, error: Exception) -> None:
        """After an error that leaves no verdict: AttemptFailed("spoiled") if there is one where no agent was."""
        if await self._context.sandboxes.was_away(self._began):
            return
        await sandbox.stop()  # its place on a host that has a limit may be needed
        async with self._context.slots.verifying:
            if not await gives_verdict_untouched(self._context.sandboxes, part.task, snapshot, part.before):
                return
        detail = f"{error}; where no agent has worked, the verifier comes to a verdict"
        raise AttemptFailed("spoiled", detail) from error

    async def _verified(self, sandbox: Sandbox, part: TaskPart, snapshot: Snapshot) -> Verdict:
        task, context = part.task, self._context
        if (task.verifier.network or task.network) == "full" and (snapshot.fresh or task.network != "full"):
            await self._note_egress("verifier")
        verifying = verifier_sandbox(
            context.sandboxes, sandbox, task, snapshot, before=part.before, more=part.more, ended=True
        )
        async with context.slots.verifying, verifying as (room, findings):
            await asyncio.to_thread(write_findings, context.logs, self._log_name, findings)
            if context.integrity is not None:
                self._evidence.append(await evidence_in(room, sandbox.work, task, findings, self._written))
            for past in range(VERIFIER_TRIES):
                try:
                    return await verify(room, task)
                except (AttemptFailed, SandboxError):
                    if past + 1 == VERIFIER_TRIES:
                        raise
                    await room.end_processes()
        raise AssertionError("the last try returns or raises")

    async def close(self, failed: AttemptFailed | None) -> None:
        """Stop the sandbox. An error in this takes the kind of what `failed` before it, if anything did.

        So a sandbox that would not start is tried again even if it cannot be stopped either, and one that broke under
        its agent is not.
        """
        if self._sandbox is not None:
            with stage(failed.kind if failed else "verifier"):
                await self._sandbox.stop()

    async def _answer(self) -> Verdict:
        """One model call, and the verdict on its answer."""
        context, task, self._may_have_calls = self._context, self._job.task, True
        with stage("harness"):
            endpoint = Endpoint(context.url, self._key, context.model, context.context_length)
            async with context.slots.agents:
                began_at = time.time()
                seconds = min(task.timeout, context.budgets.seconds or task.timeout)
                result = await ask(endpoint, task, seconds, partial(context.engine.stood_still, self._id, began_at))
            await self._add_agent_time(result, began_at)
            self._exit_code = result.exit_code
            (context.logs / f"{self._log_name}.log").write_text(result.output)
            if result.ended == "exit":
                await self._classify_end(result, task)
                if result.exit_code and self.policy_failure.kind is None:  # the output says why no answer came here
                    raise AttemptFailed("proxy", result.output)
            elif trouble := await context.trouble():
                raise trouble
            else:
                self.policy_failure = PolicyFailure("agent_budget", "the model had not answered when the time was up")
        self._evidence.append(await evidence_of_answer(task))
        with stage("verifier"):
            if task.network == "full" and task.checker is not None and task.checker.kind == "code":
                await self._note_egress("verifier")
            async with context.slots.verifying:
                return await verdict_on(task, result.output, CheckerContext(context.sandboxes, context.judge))

    async def _classify_end(self, result: Result, task: Task) -> None:
        """Set the policy's own failure, if any; AttemptFailed when the attempt says nothing about the policy.

        What the proxy saw decides, not the exit code: agents end with 0 when the model failed them, and with 1 when
        they are done.
        """
        saw = await self._context.pool(calls_seen, self._id)
        if result.ended == "exit" and result.exit_code == 127 and not saw.completed and not saw.broken:
            output = result.output[-200:].strip()
            if task.image is not None:  # of this task, so the run's other tasks may well go on
                raise AttemptFailed("image", f"the agent cannot be started in the task's image ({output})")
            raise UserError(f"the agent's command was not found ({output}); install it or correct it")
        if saw.broken:
            kind = "engine" if saw.broken.startswith("engine") else "proxy"
            raise AttemptFailed(kind, f"the last model call failed, and the agent gave up: {saw.broken}")
        if not saw.spent and (not saw.completed or result.exit_code):
            if trouble := await self._context.trouble():
                raise trouble
        if (start := self._job.rollout.start) and (left := await self._context.pool(left_replay, self._id, start)):
            raise AttemptFailed(DIFFERED, left)
        failure = PolicyFailure(LIMITS.get(result.ended), _limit_text(result))
        if saw.spent:
            kind = "agent_turns" if saw.spent == "turns" else "agent_budget"
            failure = PolicyFailure(kind, f"it used up its {saw.spent}")
        elif not saw.completed:
            how = f"exit code {result.exit_code}" if result.ended == "exit" else f"its {result.ended} limit"
            raise AttemptFailed("agent_crash", f"{how} without a completed model call: {result.output[-300:].strip()}")
        elif result.ended == "exit" and saw.completed == self._completed:  # what an earlier agent left may be the cause
            how = f"exit code {result.exit_code} without a completed model call in this step"
            raise AttemptFailed("verifier", f"{how}: {result.output[-300:].strip()}")
        self._completed = saw.completed
        if self.policy_failure.kind is None:
            self.policy_failure = failure

    async def integrity(self) -> dict[str, Any] | None:
        """What detectors of reward hacking find in the attempt that has ended. None: nobody looks."""
        if self._context.integrity is None:
            return None
        return await findings_of(labelled(await self._context.pool(of_attempt, self._id)), self._evidence)

    def explained(self, failed: AttemptFailed) -> str:
        """The failure's detail, with the limit that ended the agent where that may be the cause."""
        if self._ended_by and (failed.kind in ("verifier", "spoiled") or isinstance(failed, Unexpected)):
            return f"{failed.detail} ({self._ended_by})"
        return failed.detail

    async def close_in_pool(self, failure: str | None, detail: str) -> None:
        """End the attempt's last calls and close it: from then on it takes no row."""
        try:
            await self._end_calls()
        finally:
            ending = Ending(
                failure=failure,
                detail=detail,
                exit_code=self._exit_code,
                timings=self._timings,
                augmentation=self._augmentation,
            )
            await self._context.pool(close_attempt, self._id, ending)

    async def _end_calls(self) -> None:
        if self._may_have_calls:
            self._may_have_calls = False
            await self._context.end_calls([self._id])

    async def _add_agent_time(self, result: Result, began_at: float) -> None:
        """Add the agent's time, and how much of it its calls waited while no engine was up."""
        self._add_time("agent", result.seconds)
        if away := await self._context.engine.stood_still(self._id, began_at):
            self._add_time("engine_away", away)

    def _add_time(self, name: str, seconds: float) -> None:
        """Add to a timing; a task with steps does everything several times."""
        self._timings[name] = self._timings.get(name, 0.0) + seconds


def _variations(context: RunContext, job: RolloutJob) -> list[Variation]:
    """The variations of this rollout's environment, the same in each of its attempts."""
    augment = job.task.augment or context.augment
    if augment is None:
        return []
    member = "" if augment.per == "group" else job.rollout.member
    return chosen(augment, context.seed, job.task.id, f"{job.rollout.group_id}/{member}")


def _prompt_variation(context: RunContext, job: RolloutJob) -> PromptVariation | None:
    """What this rollout's model is shown otherwise, the same in its whole group."""
    if not context.prompt_kinds:
        return None
    return drawn(context.prompt_kinds, context.seed, job.task.id, job.rollout.group_id)


def _budget(job: RolloutJob, given: Budgets) -> Budget:
    """The smallest of what the task, the run and the group allow."""
    turns = [number for number in (job.task.max_turns, given.turns) if number is not None]
    limits = (job.task.max_tokens, given.tokens, job.rollout.max_tokens)
    tokens = [number for number in limits if number is not None]
    return Budget(turns=min(turns, default=None), tokens=min(tokens, default=None)) if turns or tokens else UNLIMITED


def _limit_text(result: Result) -> str:
    return f"the agent was ended by its {result.ended} limit" if result.ended in LIMITS else ""
