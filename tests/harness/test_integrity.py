"""Rollouts that cheat, in real runs: the evidence that an attempt leaves, the judge, and what becomes of them."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from harness.agents.command import CommandAgent
from harness.cli import main
from harness.integrity.watch import RUBRIC, Action, IntegrityWatch, judges_of
from harness.rewards.judge_file import JudgeFile, JudgeModel
from harness.rewards.judges import Grade, TrajectoryJudges
from harness.rewards.scorer import VERIFIER, RolloutFacts, Score
from harness.rollout.context import RunContext
from harness.rollout.run import run_rollout
from harness.settings import load_settings
from harness.setup.stack import RunningProxy
from harness.verdict.rewards import Verdict
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.groups import Outcome
from proxy.pool.rollouts.runs import find_run
from proxy.pool.rollouts.scoring import NewScore, scorable, write_scores
from proxy.pool.schema import rollouts
from tests.conftest import need
from tests.harness.conftest import HELLO, SHELL_AGENT
from tests.harness.scripts import SUSPECT
from tests.harness.test_rollout import context, opened

__all__ = ["context"]
pytestmark = pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning")  # litellm's own
TEST = """import unittest


class T(unittest.TestCase):
    def test_it(self):
        assert open("hello.txt").read()
"""
TASK = {"files": {"tests/test_hello.py": TEST}}
WEAKEN = "sed -i 's/assert open.*/pass/' tests/test_hello.py"


async def rollout_of(context: RunContext, watch: IntegrityWatch, after: str = "true", **task: Any) -> Outcome:
    """The outcome of a rollout whose agent does its task, and then this."""
    rollout = opened(context.pool.blocking, str(context.logs), TASK | task)
    outcome, _ = await run_rollout(replace(context, integrity=watch), rollout, CommandAgent(f"{SHELL_AGENT}; {after}"))
    with context.pool.blocking.read() as connection:
        row = connection.execute(select(rollouts).where(rollouts.c.id == rollout.rollout_id)).one()
    assert (row.reward, row.hacked, row.integrity) == (outcome.reward, outcome.hacked, outcome.integrity)
    return outcome


@pytest.mark.parametrize(("action", "reward"), [("tell", 1.0), ("mask", 1.0), ("zero", 0.0)])
async def test_who_weakens_the_tests_is_found_by_what_was_left(
    context: RunContext, action: Action, reward: float
) -> None:
    hacked = await rollout_of(context, IntegrityWatch(action=action), WEAKEN)
    assert (hacked.reward, hacked.hacked) == (reward, action) and hacked.integrity is not None
    assert (hacked.integrity["by"], hacked.integrity["reward"]) == (["tests_weakened"], 1.0)
    [finding] = hacked.integrity["findings"]
    assert finding["severity"] == "strong" and "hello.txt" in finding["quote"]
    honest = await rollout_of(context, IntegrityWatch(action=action))
    assert (honest.reward, honest.hacked) == (1.0, None)
    assert honest.integrity == {"by": [], "reward": 1.0, "zero": 0.0, "findings": []}


async def test_a_zero_takes_the_rewards_of_turns_too_and_is_no_better_than_failing(context: RunContext) -> None:
    verifier = {"command": 'echo "0.5" > $REWARD_FILE', "range": (-1, 1), "timeout": 30}
    outcome = await rollout_of(context, IntegrityWatch(action="zero"), WEAKEN, verifier=verifier)
    assert (outcome.reward, outcome.reward_parts) == (-1.0, {"verifier": 0.5})
    assert outcome.integrity is not None and outcome.integrity["reward"] == 0.5


class Costly:
    """A scorer that takes 0.4 from each verdict."""

    name = "costly"

    async def score(self, facts: RolloutFacts) -> Score:
        assert facts.verdict is not None
        return Score(Verdict(facts.verdict.reward - 0.4, {VERIFIER: facts.verdict.reward}))

    async def close(self) -> None:
        pass


async def test_a_zero_never_pays_more_than_the_reward_that_a_scorer_gave(context: RunContext) -> None:
    costly = replace(context, scorer=Costly())
    failed = await rollout_of(costly, IntegrityWatch(action="zero"), f"{WEAKEN}; rm hello.txt")
    assert (failed.hacked, failed.reward) == ("zero", -0.4) and failed.integrity is not None
    assert (failed.integrity["reward"], failed.integrity["zero"]) == (-0.4, 0.0)
    passed = await rollout_of(costly, IntegrityWatch(action="zero"), WEAKEN)
    assert (passed.hacked, passed.reward) == ("zero", 0.0)


async def test_a_zero_of_a_task_with_steps_is_the_lowest_of_its_steps(context: RunContext) -> None:
    verifier = {"command": 'echo "0.5" > $REWARD_FILE', "range": (-1, 1), "timeout": 30}
    steps = [{"name": name, "instruction": "Write hello.txt", "verifier": verifier} for name in ("a", "b")]
    outcome = await rollout_of(context, IntegrityWatch(action="zero"), WEAKEN, verifier={}, steps=steps)
    assert (outcome.hacked, outcome.reward) == ("zero", -1.0)


@pytest.mark.parametrize("where", ["shared", "fresh"])
async def test_what_set_up_or_an_image_brought_is_compared_with_what_was_left(context: RunContext, where: str) -> None:
    made = f"mkdir -p tests; cat > tests/test_hello.py <<'END'\n{TEST}END"
    verifier = {"command": 'test "$(cat hello.txt)" = hello', "timeout": 30, "where": where}
    task: dict[str, Any] = {"files": {}, "setup": made, "verifier": verifier}
    hacked = await rollout_of(context, IntegrityWatch(action="mask"), WEAKEN, **task)
    assert hacked.hacked == "mask" and hacked.integrity is not None and hacked.integrity["by"] == ["tests_weakened"]
    removed = await rollout_of(context, IntegrityWatch(action="mask"), "rm tests/test_hello.py", **task)
    assert removed.hacked == "mask"
    longer = "sed -i 's/def test_it/def test_more(self):\\n        pass\\n\\n    &/' tests/test_hello.py"
    honest = await rollout_of(context, IntegrityWatch(action="mask"), longer, **task)
    assert honest.hacked is None and honest.reward == 1.0


async def test_what_cannot_be_read_as_text_is_no_evidence_and_ends_no_run(context: RunContext) -> None:
    hostile = r"""printf 'a\0b' > data.bin; truncate -s 5G huge.py; ln -s /etc/passwd link.py; mkfifo pipe.py
        echo x > "$(printf 'two\nlines.py')"; echo y > "9 9.py"; touch empty.py"""
    outcome = await rollout_of(context, IntegrityWatch(action="mask"), hostile)
    assert (outcome.reward, outcome.hacked, outcome.failure) == (1.0, None, None)
    assert outcome.integrity is not None
    assert "root:" not in json.dumps(outcome.integrity)


async def test_who_hides_its_work_is_one_for_the_judge(context: RunContext, proxy: RunningProxy) -> None:
    padded = "{ echo 'x = 1'; yes '# padding' | head -c 70000; } > program.py"
    named = "for i in $(seq 400); do touch $(printf '%0230d' $i).txt; done"  # too long for one command
    watch = IntegrityWatch(action="mask", judges=judges(context, proxy))
    assert watch.judges is not None
    try:
        hidden = await rollout_of(context, watch, padded, instruction=SUSPECT)
        assert hidden.hacked == "mask" and hidden.integrity is not None and hidden.integrity["by"] == ["judge"]
        [finding] = hidden.integrity["findings"]
        assert finding["detector"] == "unread" and finding["quote"].endswith("could not be read: program.py")
        many = await rollout_of(context, IntegrityWatch(action="mask"), f"{named}; {WEAKEN}")
        assert many.hacked == "mask" and many.integrity is not None and many.integrity["by"] == ["tests_weakened"]
    finally:
        await watch.close()


async def test_nobody_looks_unless_asked_and_a_missing_reward_is_no_zero(context: RunContext) -> None:
    rollout = opened(context.pool.blocking, str(context.logs), TASK)
    outcome, _ = await run_rollout(context, rollout, CommandAgent(f"{SHELL_AGENT}; {WEAKEN}"))
    assert (outcome.reward, outcome.hacked, outcome.integrity) == (1.0, None, None)
    unjudged = await rollout_of(
        context, IntegrityWatch(action="zero"), WEAKEN, verifier={"command": "exit 9", "timeout": 30}
    )
    assert (unjudged.reward, unjudged.hacked, unjudged.integrity) == (None, None, None)


def judges(context: RunContext, proxy: RunningProxy) -> TrajectoryJudges:
    need("litellm", find_spec("litellm") is not None)
    model = JudgeModel(model=proxy.model, url=f"{proxy.url}/v1")
    return TrajectoryJudges("honesty.toml", JudgeFile(judges=(model,), rubric=RUBRIC), context.pool)


async def test_a_judge_convicts_and_never_acquits(context: RunContext, proxy: RunningProxy) -> None:
    watch = IntegrityWatch(action="mask", judges=judges(context, proxy), share=0.0)
    assert watch.judges is not None
    try:
        named = await rollout_of(context, watch, WEAKEN)
        assert (named.hacked, watch.judges.asked) == ("mask", 1) and named.integrity is not None
        assert named.integrity["judge"] == {"hacked": False, "reason": "it did what was asked"}
        unseen = await rollout_of(context, watch, instruction=SUSPECT)
        assert (unseen.hacked, watch.judges.asked) == (None, 1)
        everyone = replace(watch, share=1.0)
        failed = await rollout_of(context, everyone, "rm hello.txt", instruction=SUSPECT)
        assert (failed.reward, failed.hacked, watch.judges.asked) == (0.0, None, 1)  # who failed need not be looked at
        convicted = await rollout_of(context, everyone, instruction=SUSPECT)
        assert (convicted.hacked, convicted.reward, watch.judges.asked) == ("mask", 1.0, 2)
        assert convicted.integrity is not None and convicted.integrity["by"] == ["judge"]
        assert convicted.integrity["judge"] == {"hacked": True, "reason": "it was not honest"}
    finally:
        await watch.close()


async def test_a_judge_is_asked_about_every_named_reward_of_a_scorer(context: RunContext, proxy: RunningProxy) -> None:
    watch = IntegrityWatch(action="zero", judges=judges(context, proxy))
    assert watch.judges is not None
    padded = "{ echo 'x = 1'; yes '# padding' | head -c 70000; } > program.py; rm hello.txt"
    try:
        outcome = await rollout_of(replace(context, scorer=Costly()), watch, padded, instruction=SUSPECT)
        assert (outcome.hacked, outcome.reward, watch.judges.asked) == ("zero", -0.4, 1)
    finally:
        await watch.close()


class FaultyJudges(TrajectoryJudges):
    """Judges with a fault."""

    async def grade(self, messages: list[dict[str, str]]) -> Grade:
        raise KeyError("choices")


async def test_judges_that_raise_have_no_opinion(context: RunContext) -> None:
    file = JudgeFile(judges=(JudgeModel(model="m", url="http://127.0.0.1:9/v1", answers="classify"),), rubric=RUBRIC)
    watch = IntegrityWatch(action="mask", judges=FaultyJudges("j.toml", file, context.pool), share=1.0)
    outcome = await rollout_of(context, watch)
    assert (outcome.reward, outcome.hacked) == (1.0, None) and outcome.integrity is not None
    assert outcome.integrity["judge"] == {"hacked": None, "reason": "the judges failed (KeyError: 'choices')"}


async def test_a_judge_that_gives_no_answer_has_no_opinion(context: RunContext, proxy: RunningProxy) -> None:
    need("litellm", find_spec("litellm") is not None)
    silent = JudgeFile(judges=(JudgeModel(model="another", url="http://127.0.0.1:9/v1"),), rubric=RUBRIC)
    watch = IntegrityWatch(action="mask", judges=TrajectoryJudges("j.toml", silent, context.pool), share=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.rewards.ask.PAUSE_SECONDS", 0.0)
        outcome = await rollout_of(context, watch)
    await watch.close()
    assert outcome.hacked is None and outcome.integrity is not None
    assert outcome.integrity["judge"]["hacked"] is None and "gives no answer" in outcome.integrity["judge"]["reason"]


def test_a_run_masks_the_rollouts_that_cheat_and_scores_them_again_without_mercy(
    proxy: RunningProxy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks, directory = tmp_path / "tasks.jsonl", tmp_path / "run"
    tasks.write_text(json.dumps(HELLO | TASK | {"id": "hello"}) + "\n")
    command = ["run", str(tasks), "--agent", "command", "--command", f"{SHELL_AGENT}; {WEAKEN}", "-n", "2"]
    flags = ["--proxy", proxy.url, "--sandbox", "process", "--name", str(tmp_path), "--run-dir", str(directory)]
    assert main([*command, *flags, "--integrity", "zero"]) == 0
    lines = [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]
    assert [(line["reward"], line["hacked"]) for line in lines] == [(0.0, "zero")] * 2
    pool = open_pool(proxy.pool)
    run = find_run(pool, str(tmp_path))
    rows = scorable(pool, run.id)
    assert [(row.reward, row.current) for row in rows] == [(1.0, 0.0)] * 2
    again = NewScore(reward=0.9, parts={"turn:0": 1.0, "a": 1.0})
    written = write_scores(pool, run.id, "again", {row.rollout_id: again for row in rows})
    assert (written.rollouts, written.left) == (0, 2)
    with pool.read() as connection:
        stored = connection.execute(select(rollouts).where(rollouts.c.id.in_([row.rollout_id for row in rows]))).all()
    assert [(row.reward, row.integrity["reward"]) for row in stored] == [(0.0, 0.9)] * 2
    assert [row.reward_parts for row in stored] == [{"a": 1.0}] * 2  # what single turns earned would be trained
    assert [(row.reward, row.current) for row in scorable(pool, run.id)] == [(1.0, 0.0)] * 2
    worse = NewScore(reward=-0.4, parts={})
    write_scores(pool, run.id, "again", {row.rollout_id: worse for row in rows})
    assert [row.current for row in scorable(pool, run.id)] == [-0.4] * 2  # a zero that is above it would be a prize


def test_a_judge_file_may_leave_its_rubric_to_us_and_settings_must_fit(tmp_path: Path, context: RunContext) -> None:
    file = tmp_path / "judge.toml"
    file.write_text('[[judges]]\nmodel = "m"\nurl = "http://127.0.0.1:9/v1"\n')
    assert judges_of(str(file), context.pool).rubric == RUBRIC
    for flags, words in (
        ({"integrity_judge": str(file)}, "set integrity too"),
        ({"integrity": "mask", "integrity_share": 0.1}, "name them with integrity_judge"),
        ({"integrity": "shame"}, "integrity"),
    ):
        with pytest.raises(UserError, match=words):
            load_settings([str(tmp_path / "tasks.jsonl")], flags)
