"""Tasks with steps: an agent and a verdict for each, in one sandbox, with one reward in the end."""

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select

from harness.setup.stack import RunningProxy
from proxy.pool.database import open_pool
from proxy.pool.schema import rollouts
from tests.harness.conftest import HELLO

Run = Callable[..., list[dict[str, Any]]]
Parts = Callable[[], dict[str, float]]


def step(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "instruction": "Write hello.txt", "verifier": HELLO["verifier"], **more}


@pytest.fixture
def parts(proxy: RunningProxy) -> Callable[[], dict[str, float]]:
    """The reward parts of the newest rollout."""

    def newest() -> dict[str, float]:
        with open_pool(proxy.pool).read() as connection:
            query = select(rollouts.c.reward_parts).order_by(rollouts.c.id.desc()).limit(1)
            return dict(connection.scalars(query).one())

    return newest


def test_each_step_is_worked_at_and_judged_where_the_last_one_ended(run: Run, parts: Parts) -> None:
    lost = {"command": "test -e kept && test -e lost"}
    steps = [step("one", setup="touch kept"), step("two", setup="rm hello.txt"), step("three", verifier=lost)]
    (row,) = run(tasks=[{"id": "a", "steps": steps}])
    assert row["reward"] == 2 / 3 and row["failure"] is None
    assert parts() == {"verifier": 2 / 3, "step:one": 1.0, "step:two": 1.0, "step:three": 0.0}


def test_after_a_step_that_falls_short_the_others_are_left_out(run: Run, parts: Parts) -> None:
    failing = step("one", verifier={"command": "echo 0.4 > $REWARD_FILE"}, min_reward=0.5)
    (row,) = run(tasks=[{"id": "a", "steps": [failing, step("two")], "steps_reward": "final"}])
    assert row["reward"] == 0.4
    assert parts() == {"verifier": 0.4, "step:one": 0.4}


def test_the_verifiers_files_of_a_step_are_gone_when_the_next_begins(run: Run, parts: Parts) -> None:
    secret = {"command": "test -e sub/secret", "files": {"sub/secret": "answer"}}
    steps = [step("one", verifier=secret), step("two", setup="! test -e sub/secret && ! ls ~/verifier-*")]
    (row,) = run(tasks=[{"id": "a", "steps": steps}])
    assert (row["reward"], row["failure"]) == (1.0, None)
