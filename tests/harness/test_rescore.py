"""`--reward` of a run, and `harness rescore`: recorded rollouts are scored again without an agent."""

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from harness.cli import main
from harness.setup.stack import RunningProxy
from proxy.pool.completions.records import NewCompletion
from proxy.pool.database import Pool, open_pool
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import OpenRollout, Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.rollouts.scoring import NewScore, Written, scorable, write_scores
from proxy.pool.schema import rollouts
from proxy.pool.training.steps import Published
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from tests.conftest import need
from tests.harness.conftest import HELLO
from tests.pool.make import TASK, new_completion, publish_next, record

pytestmark = pytest.mark.filterwarnings("ignore:Accessing the 'model_:DeprecationWarning")  # litellm's own
MODULE = """
def words(task, verdict, rollout):
    text = rollout["turns"][0]["text"]
    if text == "none": raise ValueError("no words")
    return {"reward": len(text) / 10, "turn:0": -0.1}
def same(task, verdict, rollout): return verdict["reward"]
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "words.py").write_text(MODULE)
    return "words"


def finished(pool: Pool, run_id: int, texts: dict[str, float | None]) -> None:
    """A group whose members wrote these texts and got these rewards; None: its verifier gave no verdict."""
    members = open_group(pool, run_id, TASK, len(texts))
    for member, (text, reward) in zip(members, texts.items(), strict=True):
        finish(pool, member, text, reward)


def finish(pool: Pool, member: OpenRollout, text: str, reward: float | None) -> None:
    attempt, _ = open_attempt(pool, member.rollout_id, "command")
    item: NewCompletion = replace(new_completion(attempt.id), reply={"role": "assistant", "content": text})
    record(pool, [item])
    close_attempt(pool, attempt.id, Ending())
    parts = {} if reward is None else {"verifier": reward}
    failure = "verifier" if reward is None else None
    outcome = Outcome(attempt_id=attempt.id, reward=reward, failure=failure, detail="exit 9", reward_parts=parts)
    finish_rollout(pool, member.rollout_id, outcome)


def rows(pool: Pool) -> list[Any]:
    with pool.read() as connection:
        return list(connection.execute(select(rollouts).order_by(rollouts.c.id)))


def test_rollouts_that_no_step_has_taken_get_new_rewards_and_keep_the_old_ones(
    database: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = open_pool(database)
    run_id = open_run(pool, "r", "train", {}).id
    publish_next(pool, run_id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    finished(pool, run_id, {"one": 1.0, "three": 0.0})
    assert lease(pool, run_id, 1, LeaseRule(groups=1, window=4, max_staleness=4)) is not None
    finished(pool, run_id, {"four": 0.0, "sixteen": 1.0, "none": 1.0, "eleven": None})
    command = ["rescore", "--pool", database, "--name", "r", "--reward", f"{module}:words"]
    before = rows(pool)
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "nothing was written" in shown and rows(pool) == before
    [line] = [line.split() for line in shown.splitlines() if line.split()[:1] == ["all"]]
    assert line == ["all", "6", "0.600", "0.500", "1", "0.169"]  # 0.5 / sqrt(8.75): 3, 5, 4, 7 letters
    assert "1 without a reward: the reward function words:words raised ValueError (no words)" in shown
    assert main([*command, "--write"]) == 0
    assert "gave 4 rollouts new rewards; 2 stay as they are" in capsys.readouterr().out
    one, three, four, sixteen, none, eleven = rows(pool)
    assert [one, three] == before[:2]
    assert (four.reward, four.reward_parts, four.failure) == (0.4, {"verifier": 0.0, "turn:0": -0.1}, None)
    assert (sixteen.reward, none.reward, eleven.reward) == (0.7, None, 0.6) and eleven.failure is None
    assert none.failure == "reward" and "raised ValueError" in none.detail
    assert [(kept["by"], kept["reward"], kept["failure"]) for kept in (four.replaced + eleven.replaced)] == [
        ("words:words", 0.0, None), ("words:words", None, "verifier"),
    ]  # fmt: skip
    # the verifier's verdict is what a second scorer gets
    assert [(row.reward, row.current) for row in scorable(pool, run_id)][2:] == [
        (0.0, 0.4), (1.0, 0.7), (1.0, None), (None, 0.6),
    ]  # fmt: skip
    assert main([*command[:-1], f"{module}:same", "--write"]) == 0
    assert [row.reward for row in rows(pool)] == [1.0, 0.0, 0.0, 1.0, 1.0, None]
    assert [kept["by"] for kept in rows(pool)[4].replaced] == ["words:words", "words:same"]
    pool.close()


def test_a_group_gets_new_rewards_as_a_whole_or_not_at_all(
    database: str, module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = open_pool(database)
    run_id = open_run(pool, "r", "train", {}).id
    first, second = open_group(pool, run_id, TASK, 2)
    finish(pool, first, "three", 1.0)
    command = ["rescore", "--pool", database, "--name", "r", "--reward", f"{module}:words", "--write"]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "gave 0 rollouts new rewards; 1 stay as they are, because their groups are not finished" in shown
    assert [row.reward for row in rows(pool)] == [1.0, None] and rows(pool)[0].replaced is None
    finish(pool, second, "four", 0.0)
    alone = {first.rollout_id: NewScore(reward=0.5, parts={})}  # the second one ended while the first was scored
    assert write_scores(pool, run_id, "words:words", alone) == Written(rollouts=0, left=1)
    assert [row.reward for row in rows(pool)] == [1.0, 0.0]
    assert main(command) == 0
    assert "gave 2 rollouts new rewards\n" in capsys.readouterr().out
    assert [row.reward for row in rows(pool)] == [0.5, 0.4]
    pool.close()


def test_the_rollouts_of_a_task_share_it(database: str) -> None:
    pool = open_pool(database)
    run_id = open_run(pool, "r", "train", {}).id
    finished(pool, run_id, {"one": 1.0, "three": 0.0})
    finished(pool, run_id, {"four": 1.0})
    one, *others = scorable(pool, run_id)
    assert one.task == TASK and len(others) == 2 and all(other.task is one.task for other in others)
    pool.close()


def test_a_run_with_a_reward_function_and_the_example(
    run: Callable[..., list[dict[str, Any]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [row] = run("--reward", "examples.reward_function:brief", tasks=[HELLO])
    assert row["reward"] == 1.0
    capsys.readouterr()
    assert main(["rescore", str(tmp_path / "run"), "--reward", "examples.reward_function:brief"]) == 0
    assert ["hello", "1", "1.000", "1.000"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    for name, why in {
        "brief": "names neither a function nor judges",
        "nowhere:brief": "No module named 'nowhere'",
    }.items():
        assert main(["rescore", str(tmp_path / "run"), "--reward", name]) == 2
        assert why in capsys.readouterr().err


@pytest.mark.long
def test_a_run_with_judges_and_the_same_judges_again(
    proxy: RunningProxy,
    run: Callable[..., list[dict[str, Any]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need("litellm (pip install blackforge[providers])", find_spec("litellm") is not None)
    judge = tmp_path / "judge.toml"
    judge.write_text(f'rubric = "It greets."\n[[judges]]\nmodel = "tiny"\nurl = "{proxy.url}/v1"\n')
    [row] = run("--reward", str(judge), tasks=[HELLO])
    assert (row["reward"], row["failure"]) == (0.75, None)
    capsys.readouterr()
    assert main(["rescore", str(tmp_path / "run"), "--reward", str(judge)]) == 0
    shown = capsys.readouterr().out
    assert "questions to judges: 0;" in shown and ["hello", "1", "0.750", "0.750"] in map(str.split, shown.splitlines())
    judge.write_text(judge.read_text().replace("greets", "greets politely"))
    assert main(["rescore", str(tmp_path / "run"), "--reward", str(judge)]) == 0
    assert "questions to judges: 1;" in capsys.readouterr().out
