"""A run's reward function: asked after the verifier, in a process of its own, never in the way of a run."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from harness.agents.command import CommandAgent
from harness.rewards.function import RewardFunction
from harness.rewards.rescore import rescore
from harness.rewards.scorer import RolloutFacts, Score
from harness.rollout.context import RunContext
from harness.rollout.run import run_rollout
from harness.verdict import verifier
from harness.verdict.rewards import from_json
from proxy.pool.errors import UserError
from proxy.pool.functions import process
from proxy.pool.rollouts.groups import Outcome
from proxy.pool.rollouts.runs import find_run
from proxy.pool.rollouts.scoring import Scorable, scorable
from proxy.pool.schema import rollouts
from tests.harness.conftest import SHELL_AGENT
from tests.harness.test_rollout import context, opened

__all__ = ["context"]
Ask = Callable[..., Awaitable[Outcome]]
MODULE = """
import os, time
from harness.verdict.rewards import Verdict
def brief(task, verdict, rollout):
    assert (task["instruction"], rollout["agent"]) == ("Write hello.txt", "command") and rollout["timings"]["agent"] > 0
    turns, calls = rollout["turns"], [call for turn in rollout["turns"] for call in turn["calls"]]
    assert calls[0]["arguments"].find("hello") > 0 and turns[0]["sampled_tokens"] > 0
    assert "tool_called" in [event["kind"] for event in rollout["events"]]
    return Verdict(verdict["reward"] / len(turns), {f"turn:{turns[0]['turn']}": 0.1})
def half(task, verdict, rollout):
    return {None: 0.25, 1.0: 0.5}[verdict["reward"]] if verdict["why"] or verdict["reward"] else 7
def given(task, verdict, rollout): return verdict["reward"]
def bare(task, verdict, rollout): return {"speed": 1}
def text(task, verdict, rollout): return "1"
def endless(task, verdict, rollout): return {"reward": float("inf")}
def nothing(task, verdict, rollout): return None
def raises(task, verdict, rollout): raise KeyError("prize")
def hangs(task, verdict, rollout): time.sleep(600)
def ends(task, verdict, rollout): os._exit(3)
"""


@pytest.fixture
def ask(context: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(process, "CALL_SECONDS", 20.0)
    (tmp_path / "prizes.py").write_text(MODULE)

    async def scored(name: str, command: str = SHELL_AGENT, **task: Any) -> Outcome:
        scorer = RewardFunction(f"prizes:{name}")
        rollout = opened(context.pool.blocking, str(context.logs), dict(task))
        try:
            outcome, _ = await run_rollout(replace(context, scorer=scorer), rollout, CommandAgent(command))
        finally:
            await scorer.close()
        with context.pool.blocking.read() as connection:
            row = connection.execute(select(rollouts).where(rollouts.c.id == rollout.rollout_id)).one()
        assert (row.reward, row.failure, row.reward_parts) == (outcome.reward, outcome.failure, outcome.reward_parts)
        assert row.replaced == (None if outcome.replaced is None else [outcome.replaced])
        return outcome

    return scored


async def test_a_part_that_a_verifier_calls_verifier_replaces_no_reward(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verifier.range` holds for the reward alone. Only reward.json has parts, which needs a container."""
    monkeypatch.setattr(
        verifier, "from_text", lambda text, source: from_json(b'{"reward": 0.5, "verifier": 9}', source)
    )
    outcome = await ask("given", verifier={"command": 'echo 0.5 > "$REWARD_FILE"'})
    assert (outcome.reward, outcome.reward_parts) == (0.5, {"verifier": 0.5})


async def test_a_function_makes_the_reward_of_verdict_and_trajectory(ask: Ask) -> None:
    outcome = await ask("brief")
    assert outcome.reward == 0.5 and outcome.reward_parts == {"verifier": 1.0, "turn:0": 0.1}
    assert outcome.replaced["by"] == "prizes:brief" and outcome.replaced["reward"] == 1.0
    unjudged = await ask("half", verifier={"command": "exit 9", "timeout": 30})
    assert (unjudged.reward, unjudged.failure, unjudged.reward_parts) == (0.25, None, {})
    assert unjudged.replaced["failure"] == "verifier" and "exit code 9" in unjudged.replaced["detail"]
    crashed = await ask("half", command="exit 3")  # says nothing about the agent's work, so nobody is asked
    assert (crashed.reward, crashed.failure, crashed.replaced) == (None, "agent_crash", None)


async def test_a_function_that_fails_is_a_missing_reward_that_names_it(
    context: RunContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    row = Scorable(
        rollout_id=1, attempt_id=1, queue_index=0, member=0, state="RUNNING", agent="a", task={}, reward=1.0,
        parts={"verifier": 1.0, "tests": 0.5}, failure=None, detail="", timings={}, exit_code=0,
    )  # fmt: skip
    for name, why in {
        "bare": "returned ['speed'] and no 'reward'",
        "text": "returned a str, not a reward",
        "endless": "returned what is no reward (reward: inf)",
        "nothing": "gave no reward",
        "raises": "raised KeyError ('prize')",
        "hangs": "took longer than 0.5 s",
        "ends": "ended its process with status 3",
    }.items():
        scorer = RewardFunction(f"prizes:{name}")
        monkeypatch.setattr(process, "CALL_SECONDS", 0.5 if name == "hangs" else 20.0)
        score = await scorer.score(RolloutFacts(row, []))
        await scorer.close()
        assert (score.verdict, score.why) == (None, f"the reward function prizes:{name} {why}")
    scorer = RewardFunction("prizes:half")
    score = await scorer.score(RolloutFacts(row, []))
    await scorer.close()
    assert score.verdict is not None and score.verdict.parts == {"verifier": 1.0, "tests": 0.5}
    outcome = await ask("raises")
    assert (outcome.reward, outcome.failure) == (None, "reward") and "prizes:raises raised KeyError" in outcome.detail
    with pytest.raises(UserError, match="reward = prizes:gone cannot be used .*has no attribute 'gone'"):
        RewardFunction("prizes:gone")


class Failing:
    """A scorer with a fault: it raises where it should answer."""

    name = "failing"

    async def score(self, facts: RolloutFacts) -> Score:
        raise KeyError("turns")

    async def close(self) -> None:
        pass


async def test_a_scorer_that_raises_is_a_missing_reward_of_this_rollout(context: RunContext) -> None:
    rollout = opened(context.pool.blocking, str(context.logs), {})
    outcome, _ = await run_rollout(replace(context, scorer=Failing()), rollout, CommandAgent(SHELL_AGENT))
    assert (outcome.reward, outcome.failure, outcome.detail) == (None, "reward", "failing failed (KeyError: 'turns')")
    [row] = await context.pool(scorable, find_run(context.pool.blocking, str(context.logs)).id)
    [again] = await rescore(context.pool, Failing(), [row])
    assert (again.new, again.score.why) == (None, "failing failed (KeyError: 'turns')")
