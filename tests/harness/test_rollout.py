"""One rollout against a real proxy: how each way to end is classified and what it leaves in the pool."""

import asyncio
import os
import secrets
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from sqlalchemy import select

from harness.agents.command import CommandAgent
from harness.async_pool import AsyncPool
from harness.monitor.engine_presence import EnginePresence
from harness.monitor.hang_watch import HangWatch, run_watched
from harness.rollout.context import Budgets, RunContext
from harness.rollout.run import run_rollout
from harness.setup.stack import RunningProxy
from proxy.pool.audit import audit_lines
from proxy.pool.completions.store import of_attempt
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import by_key
from proxy.pool.rollouts.budgets import note_trouble
from proxy.pool.rollouts.groups import OpenRollout, Outcome, open_group, open_rollouts
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import attempts
from sandboxes.base import ImageError, Limits, Result, SandboxError, Sandboxes, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.fleet import HostOptions, Hosts
from sandboxes.local.process import ALONE, ProcessSandbox, ProcessSandboxes
from sandboxes.local.processes import table
from tests.daemons import Way, command_lines
from tests.harness.conftest import HELLO, SHELL_AGENT


@pytest.fixture
def context(proxy: RunningProxy, tmp_path: Path) -> RunContext:
    return RunContext(
        pool=AsyncPool(open_pool(proxy.pool)),
        sandboxes=ProcessSandboxes(tmp_path / "sandboxes"),
        url=f"{proxy.url}/v1",
        model=proxy.model,
        context_length=proxy.context_length,
        logs=tmp_path,
        trouble=proxy.trouble,
        end_calls=proxy.end_calls,
        engine=EnginePresence(proxy.url, proxy.admin_key),
        pause_seconds=0.01,
    )


def opened(pool: Pool, name: str, task: dict[str, Any]) -> OpenRollout:
    return open_group(pool, open_run(pool, name, "train", {}).id, HELLO | task, 1)[0]


async def outcome(context: RunContext, command: str = SHELL_AGENT, **task: Any) -> tuple[Outcome, list[Any]]:
    """The outcome of a rollout with this agent, and its attempts."""
    rollout = opened(context.pool.blocking, str(context.logs), task)
    came, _ = await run_rollout(context, rollout, CommandAgent(command))
    with context.pool.blocking.read() as connection:
        query = select(attempts).where(attempts.c.rollout_id == rollout.rollout_id).order_by(attempts.c.id)
        return came, list(connection.execute(query))


async def test_a_verdict_is_written_with_its_attempt(context: RunContext) -> None:
    came, tries = await outcome(context)
    assert (came.reward, came.failure, came.attempt_id) == (1.0, None, tries[-1].id)
    assert tries[0].exit_code == 0 and tries[0].timings["agent"] > 0
    assert open_rollouts(context.pool.blocking, tries[0].run_id) == []


async def test_a_timeout_gets_its_verdict_and_ends_daemons(context: RunContext) -> None:
    came, tries = await outcome(context, f"{SHELL_AGENT}; setsid sleep 631 & sleep 632", timeout=10)
    assert (came.reward, came.failure, len(tries)) == (1.0, "agent_budget", 1)
    assert not [process for process in table() if process.sandbox.startswith(f"{os.getpid()}-")]


async def test_too_much_memory_gets_its_verdict(context: RunContext) -> None:
    hog = f"{sys.executable} -I -S -c 'import time; x = bytearray(90 << 20); time.sleep(600)'"
    came, _ = await outcome(context, f"{SHELL_AGENT}; {hog}", limits={"memory_mb": 80})
    assert (came.reward, came.failure) == (1.0, "agent_memory")


@pytest.mark.parametrize("command", ["exit 3", "true", "sleep 600"])
async def test_an_agent_without_a_model_call_is_tried_again_and_then_masked(context: RunContext, command: str) -> None:
    came, tries = await outcome(context, command, timeout=1)
    assert (came.reward, came.failure) == (None, "agent_crash")
    assert [(attempt.number, attempt.failure) for attempt in tries] == [(n, "agent_crash") for n in range(3)]


async def test_a_failing_set_up_is_tried_again_and_then_masked(context: RunContext) -> None:
    came, tries = await outcome(context, setup="echo no disk; exit 7")
    assert (came.reward, came.failure, len(tries)) == (None, "sandbox_start", 3)
    assert came.detail == "set-up ended by exit code 7: no disk"


STEP = {
    "name": "one",
    "instruction": "Write hello.txt",
    "verifier": {"command": 'test "$(cat hello.txt)" = hello', "where": "fresh"},
}


@pytest.mark.parametrize(
    ("agent", "setup", "kind", "why"),
    [
        (SHELL_AGENT, "test -e never", "verifier", "set-up ended by exit code 1"),
        (SHELL_AGENT, "test ! -e hello.txt", "spoiled", "set-up ended by exit code 1"),
        (f"{SHELL_AGENT}; rm -r ~; ln -s /nowhere ~", "", "spoiled", "instruction.md cannot be written"),
        (f"test -e hello.txt && exit 3; {SHELL_AGENT}", "", "spoiled", "exit code 3 without a completed model call"),
        (f"test -e hello.txt && exit 127; {SHELL_AGENT}", "", "spoiled", "exit code 127 without"),
    ],
    ids=["its set-up fails", "set-up fails on the work", "no file can be written", "crash", "no such command"],
)
async def test_a_step_that_cannot_begin_where_an_agent_has_worked_is_not_tried_again(
    context: RunContext, agent: str, setup: str, kind: str, why: str
) -> None:
    """Otherwise an agent that breaks the next step would get another chance at this one."""
    came, tries = await outcome(context, agent, steps=[STEP, {**STEP, "name": "two", "setup": setup}])
    assert (came.reward, came.failure, len(tries)) == (None, kind, 1)
    assert why in came.detail


async def test_a_step_whose_agent_runs_out_of_time_without_an_answer_gets_its_verdict(context: RunContext) -> None:
    agent = f"test -e hello.txt && exec sleep 638; {SHELL_AGENT}"
    came, tries = await outcome(context, agent, steps=[STEP, {**STEP, "name": "two", "timeout": 1}])
    assert (came.reward, came.failure, len(tries)) == (1.0, "agent_budget", 1)


async def test_a_verifier_without_a_verdict_leaves_the_reward_missing(context: RunContext) -> None:
    came, tries = await outcome(context, verifier={"command": "exit 2"})
    assert (came.reward, came.failure, len(tries)) == (None, "verifier", 1)


async def test_a_verifier_that_failed_by_itself_is_asked_again(context: RunContext) -> None:
    once = "test -e asked || { touch asked; exit 2; }"
    came, tries = await outcome(context, verifier={"command": once})
    assert (came.reward, came.failure, len(tries)) == (1.0, None, 1)


@pytest.mark.parametrize(("given", "asked"), [(1, None), (None, 1), (5, 1), (1, 5)])
async def test_turns_beyond_the_budget_are_refused_and_the_verdict_counts(
    context: RunContext, given: int | None, asked: int | None
) -> None:
    limited = replace(context, budgets=Budgets(turns=given))
    came, tries = await outcome(limited, f"{SHELL_AGENT} || true", **({} if asked is None else {"max_turns": asked}))
    assert (came.reward, came.failure, came.detail) == (1.0, "agent_turns", "it used up its turns")
    assert [(attempt.spent, attempt.exit_code) for attempt in tries] == [("turns", 0)]
    assert "this attempt has used up its 1 turns" in (context.logs / f"attempt-{tries[0].id}.log").read_text()


async def test_an_agent_whose_call_was_refused_is_not_run_again_for_a_busy_engine(
    context: RunContext, proxy: RunningProxy
) -> None:
    """It had all its calls and ends with an error for the refusal, whatever the engine's health is then."""
    busy = replace(context, trouble=replace(proxy, url="http://127.0.0.1:1").trouble)
    came, tries = await outcome(busy, max_turns=1)
    assert (came.reward, came.failure, came.detail) == (1.0, "agent_turns", "it used up its turns")
    assert len(tries) == 1 and tries[0].exit_code


async def test_an_agent_that_goes_on_after_a_refusal_is_ended(
    context: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.monitor.hang_watch.REFUSED_SECONDS", 0.2)
    came, tries = await outcome(context, f"{SHELL_AGENT} || sleep 635", max_turns=1, timeout=100)
    assert (came.reward, came.failure, came.detail) == (1.0, "agent_turns", "it used up its turns")
    assert len(tries) == 1 and tries[0].timings["agent"] < 90
    assert "this attempt has used up its 1 turns" in (context.logs / f"attempt-{tries[0].id}.log").read_text()


async def test_tokens_beyond_the_budget_are_refused_too(context: RunContext) -> None:
    came, _ = await outcome(context, max_tokens=3)
    assert (came.reward, came.failure, came.detail) == (1.0, "agent_budget", "it used up its tokens")


async def test_an_agent_that_stays_within_its_budget_is_not_marked(context: RunContext) -> None:
    came, _ = await outcome(context, max_turns=2, max_tokens=100_000)
    assert (came.reward, came.failure) == (1.0, None)


async def test_the_run_may_give_less_time_than_the_task(context: RunContext) -> None:
    came, _ = await outcome(replace(context, budgets=Budgets(seconds=10)), f"{SHELL_AGENT}; sleep 600")
    assert (came.reward, came.failure) == (1.0, "agent_budget")


async def test_an_agent_without_a_sign_of_life_is_hung_and_its_group_filtered(context: RunContext) -> None:
    patient = replace(context, budgets=Budgets(hung_seconds=1))
    came, tries = await outcome(patient, f"{SHELL_AGENT}; setsid sleep 633 & sleep 634")
    assert (came.reward, came.failure, len(tries)) == (None, "hung", 1)
    assert not [process for process in table() if process.sandbox.startswith(f"{os.getpid()}-")]


async def test_output_is_a_sign_of_life(context: RunContext) -> None:
    sandbox = await context.sandboxes.start(Spec())
    try:
        talking = "for i in 1 2 3 4 5 6 7 8 9 10; do sleep 0.5; echo; done"
        result = await run_watched(sandbox, talking, Limits(), {}, HangWatch(context.pool, 0, patience=4))
    finally:
        await sandbox.stop()
    assert (result.ended, result.exit_code) == ("exit", 0) and result.seconds > 4


async def test_exit_0_after_a_call_that_the_engine_failed_is_no_verdict(context: RunContext) -> None:
    rollout = opened(context.pool.blocking, str(context.logs), {})
    asked = context.logs / "asked"
    gives_up = CommandAgent(f"{SHELL_AGENT}; echo $OPENAI_API_KEY >> {asked}; until test -e {asked}.noted; do :; done")
    running = asyncio.create_task(run_rollout(context, rollout, gives_up))
    while not (asked.exists() and asked.read_text().endswith("\n")):
        await asyncio.sleep(0.01)
    attempt = by_key(context.pool.blocking, asked.read_text().strip())
    assert attempt is not None
    note_trouble(context.pool.blocking, attempt.id, "engine_silent: nothing came for 60 s")  # as the proxy does
    (context.logs / "asked.noted").touch()
    came, _ = await running
    assert (came.reward, came.failure) == (1.0, None)  # in its second attempt
    with context.pool.blocking.read() as connection:
        row = connection.execute(select(attempts).where(attempts.c.id == attempt.id)).one()
    assert (row.failure, row.exit_code) == ("engine", 0) and "engine_silent" in row.detail


@asynccontextmanager
async def losing(url: str) -> AsyncIterator[str]:
    """The URL of an endpoint before the proxy's that loses the first answer on its way back."""
    lost: list[bytes] = []

    async def forward(request: web.Request) -> web.Response:
        headers = {name: request.headers[name] for name in ("Authorization", "Content-Type")}
        async with (
            ClientSession() as client,
            client.post(f"{url}/chat/completions", data=await request.read(), headers=headers) as reply,
        ):
            answer = await reply.read()
        if not lost and request.transport is not None:
            lost.append(answer)
            request.transport.close()
        return web.Response(body=answer, content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/chat/completions", forward)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def test_an_answer_that_is_recorded_and_lost_on_its_way_is_asked_for_again(context: RunContext) -> None:
    """The text of the error was graded as if the policy had written it."""
    question: dict[str, Any] = {
        "domain": "reasoning",
        "instruction": "What is 6 * 7?",
        "checker": {"kind": "exact", "answer": "42"},
    }
    async with losing(context.url) as url:
        came, tries = await outcome(replace(context, url=url), **question)
    assert (came.reward, [attempt.failure for attempt in tries]) == (1.0, ["proxy", None])
    assert len(of_attempt(context.pool.blocking, tries[0].id)) == 1 and "gives no answer" in tries[0].detail


LEAVES = """
import json, os, urllib.request
url, key = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
body = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Count"}]}
headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
asked = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)
stream = urllib.request.urlopen(asked)
while b"one" not in stream.readline(): pass
"""
"""Asks for a long answer and leaves when it has begun."""


async def test_what_was_sampled_for_an_agent_that_left_is_recorded(context: RunContext) -> None:
    (context.logs / "leaves.py").write_text(LEAVES)
    leaves = f"{sys.executable} -I -S {context.logs / 'leaves.py'}"
    came, [attempt] = await outcome(context, f"{SHELL_AGENT}; {leaves}; touch {context.logs}/left")
    assert came.reward == 1.0 and (context.logs / "left").exists()
    *_, row = of_attempt(context.pool.blocking, attempt.id)
    assert (str(row.untrainable), row.finish_reason) == ("abandoned", "abort") and row.sampled


async def test_a_slow_database_stalls_no_other_attempt(context: RunContext) -> None:
    """While one query waits for a lock, the event loop and the other queries go on."""
    free = threading.Event()
    waiting = asyncio.create_task(context.pool(lambda pool: free.wait(200)))
    came, _ = await outcome(context)
    assert came.reward == 1.0 and not waiting.done()
    free.set()
    assert await waiting


class Failing(ProcessSandboxes):
    """Sandboxes whose image cannot be had, or in which the agent's command raises this."""

    def __init__(self, root: Path, broken: Exception | None):
        super().__init__(root)
        self._broken = broken

    async def start(self, spec: Spec = ALONE) -> ProcessSandbox:
        if self._broken is None:
            raise ImageError("the image of /tasks/a cannot be built; its log ends:\nRUN false")
        sandbox = await super().start(spec)
        run = sandbox.run

        async def losing(command: str, *more: Any, **named: Any) -> Result:
            if self._broken is not None and command == SHELL_AGENT:
                raise self._broken
            return await run(command, *more, **named)

        vars(sandbox)["run"] = losing
        return sandbox


@pytest.mark.parametrize(
    ("broken", "kind", "detail"),
    [
        (None, "image", "its log ends"),
        (SandboxError("the container is gone"), "tool_flake", "the container is gone"),
        (ValueError("no number: 'x'"), "tool_flake", "ValueError: no number: 'x'"),  # not classified: still no retry
    ],
)
async def test_an_image_that_cannot_be_built_and_what_breaks_under_the_agent_are_told_apart(
    context: RunContext, tmp_path: Path, broken: Exception | None, kind: str, detail: str
) -> None:
    came, tries = await outcome(replace(context, sandboxes=Failing(tmp_path / "failing", broken)))
    assert (came.reward, came.failure, len(tries)) == (None, kind, 1)
    assert detail in came.detail and list(tmp_path.glob("failing/*")) == []


async def test_an_outage_of_the_verifiers_host_alone_is_nobodys_fault(
    context: RunContext, docker_daemon: str, tmp_path: Path
) -> None:
    """The agent works on the first host, its verdict is begun on the second and reached on the first."""
    way = Way(tmp_path, docker_daemon)
    named = f"sleep {secrets.randbits(40)}"

    async def opening(address: str) -> Sandboxes:
        if address == "here":
            return ProcessSandboxes(tmp_path / "sandboxes")
        return await DockerSandboxes.open(Options(address=way.address, image="deb:py", run="test"))

    hosts = Hosts([HostOptions(address="here"), HostOptions(address="there", weight=0.9)], opening, kind="process")
    check = {"command": f'! test -d /home/verifier || {named}; test "$(cat hello.txt)" = hello', "where": "fresh"}
    running = asyncio.create_task(outcome(replace(context, sandboxes=hosts), verifier=check))
    async with asyncio.timeout(300):
        while not running.done() and not any(named in line for line in command_lines()):
            await asyncio.sleep(0.05)
    way.close()
    try:
        came, tries = await running
        assert (came.reward, [attempt.failure for attempt in tries]) == (1.0, ["outage", None])
        assert "what ran the verifier's sandbox was away" in tries[0].detail
    finally:
        way.open()
        await hosts.close()
        way.close()


class Lenient(ProcessSandboxes):
    """Sandboxes that any image will do for, and that raise this once the agent has made this file."""

    def __init__(self, root: Path, broken: Path):
        super().__init__(root)
        self._broken = broken
        self.error: Exception = SandboxError("the container is gone")

    async def start(self, spec: Spec = ALONE) -> ProcessSandbox:
        sandbox = await super().start(replace(spec, image=None))
        vars(sandbox)["changed"] = self._changed
        return sandbox

    async def _changed(self) -> dict[str, bool]:
        if self._broken.exists():
            raise self.error
        return {}


@pytest.fixture
def lenient(context: RunContext, tmp_path: Path) -> RunContext:
    return replace(context, sandboxes=Lenient(tmp_path / "lenient", tmp_path / "broken"))


@pytest.mark.parametrize("error", [SandboxError("the container is gone"), OSError("the container is gone")])
async def test_what_broke_under_the_agent_is_masked_and_not_tried_again(lenient: RunContext, error: Exception) -> None:
    """Otherwise an agent that breaks its sandbox would get another chance, which one that merely fails does not."""
    assert isinstance(lenient.sandboxes, Lenient)
    lenient.sandboxes.error = error
    came, tries = await outcome(lenient, f"{SHELL_AGENT}; touch {lenient.logs}/broken; sleep 637", timeout=10)
    assert (came.reward, came.failure, len(tries)) == (None, "spoiled", 1)
    reason = "the container is gone; where no agent has worked, the verifier comes to a verdict"
    assert came.detail == f"{reason} (the agent was ended by its timeout limit)"


async def test_the_audit_log_says_who_was_given_a_full_network(context: RunContext) -> None:
    given = {"network": "full", "reach": ["10.0.0.0/8"]}
    for task in ({}, given, {"verifier": {"command": "true", "network": "full"}}):
        _, [attempt] = await outcome(context, **task)
        lines = [line for line in audit_lines(context.pool.blocking) if f" attempt {attempt.id} of command, " in line]
        who = {"agent"} if task == given else {"verifier"} if task else set()
        assert {line.split(", ", 1)[1] for line in lines} == {f"{one}: whatever its machine reaches" for one in who}
        assert all(" egress       run " in line for line in lines)


async def test_the_key_dies_with_the_attempt(context: RunContext, tmp_path: Path) -> None:
    _, tries = await outcome(context, f'echo "$OPENAI_API_KEY" > {tmp_path}/key; {SHELL_AGENT}')
    assert tries[0].closed_at is not None
    late = CommandAgent(f"OPENAI_API_KEY=$(cat {tmp_path}/key) {SHELL_AGENT}")
    again, _ = await run_rollout(context, opened(context.pool.blocking, str(context.logs), {}), late)
    assert again.failure == "agent_crash" and "401" in again.detail


async def test_a_command_that_is_not_there_ends_the_run_and_leaves_the_rollout_open(context: RunContext) -> None:
    with pytest.raises(UserError, match="no-such-agent.*not found"):
        await outcome(context, "no-such-agent --fast")
    run_id = open_run(context.pool.blocking, str(context.logs), "train", {}).id
    assert len(open_rollouts(context.pool.blocking, run_id)) == 1


async def test_an_image_of_one_task_that_cannot_hold_the_agent_does_not_end_the_run(lenient: RunContext) -> None:
    came, tries = await outcome(lenient, "no-such-agent --fast", image={"name": "musl"})
    assert (came.reward, came.failure, len(tries)) == (None, "image", 1)
    assert (
        came.detail.startswith("the agent cannot be started in the task's image (") and "no-such-agent" in came.detail
    )


async def test_a_proxy_that_is_gone_ends_the_run_and_leaves_the_rollout_open(context: RunContext) -> None:
    gone = RunningProxy("http://127.0.0.1:9", context.pool.blocking.url, "model", 1000)
    with pytest.raises(UserError, match="the proxy http://127.0.0.1:9 does not answer .* repeat the same command"):
        await outcome(replace(context, url=f"{gone.url}/v1", trouble=gone.trouble))
    assert (
        len(open_rollouts(context.pool.blocking, open_run(context.pool.blocking, str(context.logs), "train", {}).id))
        == 1
    )


async def test_an_error_in_our_own_code_is_a_row_too(context: RunContext, tmp_path: Path) -> None:
    came, _ = await outcome(replace(context, logs=tmp_path / "missing"))
    assert came.failure == "harness" and came.detail.startswith("FileNotFoundError")
