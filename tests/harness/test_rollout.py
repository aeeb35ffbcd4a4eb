"""One rollout against a real proxy: how each way to end is classified and what it leaves in the pool."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from harness.agents.command import Command
from harness.rollout import Bench, run_rollout
from harness.services import Service
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.groups import OpenRollout, Outcome, open_group, open_rollouts
from proxy.pool.runs import open_run
from proxy.pool.schema import attempts
from sandboxes.process import ProcessSandboxes
from sandboxes.processes import table
from tests.harness.conftest import HELLO, SHELL_AGENT


@pytest.fixture
def bench(proxy: Service, tmp_path: Path) -> Bench:
    return Bench(
        pool=open_pool(proxy.pool),
        sandboxes=ProcessSandboxes(tmp_path / "sandboxes"),
        agent=Command(SHELL_AGENT),
        url=f"{proxy.url}/v1",
        model=proxy.model,
        context_length=proxy.context_length,
        logs=tmp_path,
        trouble=proxy.trouble,
        pause_seconds=0.01,
    )


def opened(pool: Pool, name: str, task: dict[str, Any]) -> OpenRollout:
    return open_group(pool, open_run(pool, name, "train", {}).id, HELLO | task, 1)[0]


async def outcome(bench: Bench, command: str = SHELL_AGENT, **task: Any) -> tuple[Outcome, list[Any]]:
    """The outcome of a rollout with this agent, and its attempts."""
    rollout = opened(bench.pool, str(bench.logs), task)
    came = await run_rollout(replace(bench, agent=Command(command)), rollout)
    with bench.pool.read() as connection:
        query = select(attempts).where(attempts.c.rollout_id == rollout.rollout_id).order_by(attempts.c.id)
        return came, list(connection.execute(query))


async def test_a_verdict_is_written_with_its_attempt(bench: Bench) -> None:
    came, tries = await outcome(bench)
    assert (came.reward, came.failure, came.attempt_id) == (1.0, None, tries[-1].id)
    assert tries[0].exit_code == 0 and tries[0].timings["agent"] > 0
    assert open_rollouts(bench.pool, tries[0].run_id) == []


async def test_a_timeout_gets_its_verdict_and_ends_daemons(bench: Bench) -> None:
    came, tries = await outcome(bench, f"{SHELL_AGENT}; setsid sleep 631 & sleep 632", timeout=10)
    assert (came.reward, came.failure, len(tries)) == (1.0, "agent_timeout", 1)
    assert not [process for process in table() if process.sandbox.startswith(f"{os.getpid()}-")]


async def test_too_much_memory_gets_its_verdict(bench: Bench) -> None:
    hog = f"{sys.executable} -I -S -c 'import time; x = bytearray(90 << 20); time.sleep(600)'"
    came, _ = await outcome(bench, f"{SHELL_AGENT}; {hog}", limits={"memory_mb": 80})
    assert (came.reward, came.failure) == (1.0, "agent_memory")


@pytest.mark.parametrize("command", ["exit 3", "true", "sleep 600"])
async def test_an_agent_without_a_model_call_is_tried_again_and_then_masked(bench: Bench, command: str) -> None:
    came, tries = await outcome(bench, command, timeout=1)
    assert (came.reward, came.failure) == (None, "agent_crash")
    assert [(attempt.number, attempt.failure) for attempt in tries] == [(n, "agent_crash") for n in range(3)]


async def test_a_failing_set_up_is_tried_again_and_then_masked(bench: Bench) -> None:
    came, tries = await outcome(bench, setup="echo no disk; exit 7")
    assert (came.reward, came.failure, len(tries)) == (None, "sandbox_start", 3)
    assert came.detail == "set-up ended by exit code 7: no disk"


async def test_a_verifier_without_a_verdict_leaves_the_reward_missing(bench: Bench) -> None:
    came, tries = await outcome(bench, verifier={"command": "exit 2"})
    assert (came.reward, came.failure, len(tries)) == (None, "verifier", 1)


async def test_the_key_dies_with_the_attempt(bench: Bench, tmp_path: Path) -> None:
    _, tries = await outcome(bench, f'echo "$OPENAI_API_KEY" > {tmp_path}/key; {SHELL_AGENT}')
    assert tries[0].closed_at is not None
    late = Command(f"OPENAI_API_KEY=$(cat {tmp_path}/key) {SHELL_AGENT}")
    again = await run_rollout(replace(bench, agent=late), opened(bench.pool, str(bench.logs), {}))
    assert again.failure == "agent_crash" and "401" in again.detail


async def test_a_command_that_is_not_there_ends_the_run_and_leaves_the_rollout_open(bench: Bench) -> None:
    with pytest.raises(UserError, match="no-such-agent.*not found"):
        await outcome(bench, "no-such-agent --fast")
    run_id = open_run(bench.pool, str(bench.logs), "train", {}).id
    assert len(open_rollouts(bench.pool, run_id)) == 1


async def test_a_proxy_that_is_gone_ends_the_run_and_leaves_the_rollout_open(bench: Bench) -> None:
    gone = Service("http://127.0.0.1:9", bench.pool.url, "model", 1000)
    with pytest.raises(UserError, match="the proxy http://127.0.0.1:9 does not answer .* repeat the same command"):
        await outcome(replace(bench, url=f"{gone.url}/v1", trouble=gone.trouble))
    assert len(open_rollouts(bench.pool, open_run(bench.pool, str(bench.logs), "train", {}).id)) == 1


async def test_an_error_in_our_own_code_is_a_row_too(bench: Bench, tmp_path: Path) -> None:
    came, _ = await outcome(replace(bench, logs=tmp_path / "missing"))
    assert came.failure == "harness" and came.detail.startswith("FileNotFoundError")
