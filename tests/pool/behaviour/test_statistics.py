"""Figures of what rollouts did, against numbers that a reader counts."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import update

from harness.cli import main
from proxy.pool.behaviour.statistics import Statistics, drift, of_rollout
from proxy.pool.completions.records import Completion
from proxy.pool.database import Pool, open_pool
from proxy.pool.inspect.run_behaviour import reward_trend, run_behaviour
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import groups
from tests.pool.behaviour.work import Failed, Work, edit
from tests.pool.make import TASK, new_completion, record


def worked() -> list[Completion]:
    """Five turns of 2 s each, and 3 s after each of them; one call fails, one is repeated, the third turn edits."""
    work = Work().shell("ls", answer="a.py").shell("ls", answer="a.py").turn(edit("a.py", "x", "y"), reasoning="ab")
    work.shell("pytest", answer=Failed("Exit code 4")).done("1234")
    return completions_of(work)


def completions_of(work: Work) -> list[Completion]:
    items = []
    for place, row in enumerate(work.rows):
        at = 100.0 + 5 * place
        new = replace(new_completion(1), reply=row.reply, observed=row.observed, started_at=at, finished_at=at + 2)
        own = {"id": row.id, "ordinal": place, "follows": row.follows, "label": "main"}
        items.append(Completion(**{**vars(new), **own}))
    return items


def test_figures_of_rollouts_and_their_sums() -> None:
    figures = of_rollout(worked(), 1.0)
    assert figures.means() == pytest.approx(
        {
            "reward": 1.0, "turns": 5.0, "calls": 4.0, "failure_rate": 0.25, "repeat_rate": 0.25,
            "characters_per_turn": figures.characters / 5, "reasoning_share": 2 / figures.characters,
            "turns_to_first_edit": 3.0, "model_seconds": 10.0, "tool_seconds": 12.0, "tool_time_share": 12 / 22,
        }
    )  # fmt: skip
    assert figures.commands == {"bash: ls": 2, "edit": 1, "bash: pytest": 1}
    both = Statistics()
    both.merge(figures)
    both.merge(of_rollout([], None))
    assert both.means() | {"reward": 1.0, "turns": 2.5, "calls": 2.0} == both.means()
    assert both.tools["bash"].failed == 1 and both.events_per_rollout()["repeated_call"] == 0.5
    assert of_rollout([], None).means().keys() == {"turns", "calls", "model_seconds", "tool_seconds"}
    unknown = of_rollout([replace(item, observed=None) for item in worked()], 0.0)
    assert "failure_rate" not in unknown.means() and unknown.means()["calls"] == 4


def test_drift_is_the_jensen_shannon_divergence() -> None:
    assert drift({"a": 2, "b": 2}, {"a": 50, "b": 50}) == 0 and drift({"a": 1}, {"b": 9}) == 1
    assert drift({"a": 1, "b": 1}, {"a": 1}) == pytest.approx(0.311278)
    assert drift({}, {"a": 1}) is None


def finish(
    pool: Pool, run_id: int, work: Sequence[Completion], reward: float | None = 1.0, failure: str = "", **task: str
) -> int:
    """A group of one rollout that did this. Returns the rollout's id."""
    [member] = open_group(pool, run_id, TASK | task, 1)
    attempt, _ = open_attempt(pool, member.rollout_id, "command")
    items = [
        replace(new_completion(attempt.id), reply=i.reply, observed=i.observed, untrainable=i.untrainable) for i in work
    ]
    before = record(pool, items[:1])[0]
    for item in items[1:]:
        before = record(pool, [replace(item, follows=before)])[0]
    close_attempt(pool, attempt.id, Ending())
    outcome = Outcome(attempt_id=attempt.id, reward=reward, failure=failure or None)
    finish_rollout(pool, member.rollout_id, outcome)
    return member.rollout_id


def test_a_run_is_added_up_by_what_is_asked(pool: Pool) -> None:
    run = open_run(pool, "r", "collect", {})
    for name, domain in (("one", "code"), ("two", "shell")):
        finish(pool, run.id, worked(), id=name, domain=domain)
    sizes = {
        by: {k: v.rollouts for k, v in run_behaviour(pool, run.id, by).items()} for by in ("step", "agent", "tool")
    }
    assert sizes == {"step": {"-": 2}, "agent": {"command": 2}, "tool": {"bash": 2, "edit": 2}}
    assert list(run_behaviour(pool, run.id, "domain")) == ["code", "shell"]
    by_task = run_behaviour(pool, run.id, "task")
    assert by_task["two"].means()["failure_rate"] == 0.25 and by_task["two"].means()["repeat_rate"] == 0.25
    by_tool = run_behaviour(pool, run.id, "tool")
    assert by_tool["bash"].means() == pytest.approx(
        {"reward": 1.0, "calls": 3.0, "failure_rate": 1 / 3, "repeat_rate": 1 / 3}
    )
    assert by_tool["edit"].means()["repeat_rate"] == 0 and by_tool["edit"].commands == {"edit": 2}


def test_the_first_step_is_the_base_of_the_drift_and_rewards_have_a_trend(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps 9 and 10 took a group each; one that no step has taken ran another command."""
    pool = open_pool(str(tmp_path / "pool.db"))
    run = open_run(pool, "r", "collect", {})
    for command, reward in (("ls", 0.0), ("pytest", 0.5), ("make", 1.0)):
        finish(pool, run.id, completions_of(Work().shell(command).done()), reward)
    with pool.write() as connection:
        for group, step in ((1, 9), (2, 10)):
            connection.execute(update(groups).where(groups.c.id == group).values(step=step, state="CONSUMED"))
    assert list(run_behaviour(pool, run.id, "step")) == ["9", "10", "-"]
    assert reward_trend(pool, run.id, "agent") == {"command": (0.0, 0.75)}
    pool.close()
    shown: dict[str, dict[str, list[str]]] = {}
    for by in ("step", "agent", "tool"):
        assert main(["behaviour", "--pool", str(tmp_path / "pool.db"), "--name", "r", "--by", by]) == 0
        lines = capsys.readouterr().out.splitlines()
        shown[by] = {}
        for words in (words for line in lines if (words := line.split())):
            shown[by].setdefault(words[0], []).extend(words)
    assert [shown["step"][step][-1] for step in ("9", "10", "-")] == ["0.000", "1.000", "1.000"]
    both = " ".join(shown["agent"]["command"])
    assert "0.000 0.750 command bash: ls 33%, bash: pytest 33%, bash: make 33%" in both
    assert shown["tool"]["tool"] == ["tool", "rollouts", "reward", "calls", "failed", "repeated"]
    assert shown["tool"]["bash"] == ["bash", "3", "0.500", "1.0", "0.0%", "0.0%"]
