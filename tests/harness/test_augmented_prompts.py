"""A run whose models are shown other names, words and results than its agents write (docs/augmentation.md)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import select

from harness.agents import INSTALLED
from harness.agents.mix import Scaffold, check_kinds
from harness.setup.stack import RunningProxy, check_tool_formats
from proxy.augment.names import Pairs
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import by_id
from proxy.pool.rollouts.prompt_variations import PROMPT_KINDS
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import attempts, rollouts
from proxy.pool.training.finished_rollouts import finished_rollouts
from tests.harness.conftest import HELLO
from tests.harness.test_agents import need_agent

KINDS = ",".join(kind for kind in PROMPT_KINDS if kind != "tool_format")
TASKS = [HELLO | {"id": f"hello-{number}"} for number in range(6)]


def check(proxy: RunningProxy, name: str, calls: int) -> None:
    """Members of a group are varied alike, what varied is listed, and each model has called `shell` by the name that it
    was shown."""
    pool = open_pool(proxy.pool)
    run_id = find_run(pool, name).id
    with pool.read() as connection:
        rows = connection.execute(
            select(attempts.c.id, attempts.c.augmentation, rollouts.c.group_id)
            .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
            .where(attempts.c.run_id == run_id)
        ).all()
    of_group: dict[int, list[str]] = {}
    shown: dict[int, str] = {}
    for row in rows:
        attempt = by_id(pool, row.id)
        assert attempt is not None
        variation = attempt.variation
        assert (row.augmentation or []) == (variation.lines() if variation else [])
        assert of_group.setdefault(row.group_id, row.augmentation) == row.augmentation
        renamed = variation is not None and "tool_names" in variation.kinds
        shown[row.id] = Pairs(["shell"], variation.seed, "tool")["shell"] if variation and renamed else "shell"
    assert len({tuple(kinds) for kinds in of_group.values()}) > 2
    said = [
        (call["function"]["name"], shown[item.attempt_id])
        for rollout in finished_rollouts(pool, run_id)
        for item in rollout.completions
        for call in item.reply.get("tool_calls", ())
    ]
    assert len(said) == calls and all(called == expected for called, expected in said)


def test_agents_work_and_models_learn_other_names(
    run: Callable[..., list[dict[str, Any]]], proxy: RunningProxy, tmp_path: Any
) -> None:
    rows = run("--augment", KINDS, "-n", "2", tasks=TASKS)
    assert [row["reward"] for row in rows] == [1.0] * 12
    assert all(row["trainable"] == row["completions"] == 2 for row in rows)
    check(proxy, tmp_path.name, calls=12)


@pytest.mark.long
@pytest.mark.parametrize("name", ["openai-agents", "pydantic-ai"])
def test_unmodified_agents_work_under_every_kind(
    name: str, run: Callable[..., list[dict[str, Any]]], proxy: RunningProxy, tmp_path: Any
) -> None:
    need_agent(name)
    tasks = [task | {"timeout": 240} for task in TASKS]
    rows = run("--augment", KINDS, "--agent", name, tasks=tasks, command=None)
    assert [row["reward"] for row in rows] == [1.0] * 6 and all(row["trainable"] == row["completions"] for row in rows)
    check(proxy, tmp_path.name, calls=6)


def test_an_agent_that_names_its_tools_is_refused() -> None:
    for name in ("opencode", "native", "smolagents"):
        scaffold = Scaffold(name=name, agent=INSTALLED[name])
        check_kinds([scaffold], ["shell", "observations", "truncation"])
        check_kinds([Scaffold(name=name, agent=INSTALLED[name], weight=0)], ["tool_names"])
        with pytest.raises(UserError, match=f"argument_names changes names that the agent '{name}' speaks of"):
            check_kinds([scaffold], ["tool_names", "argument_names"])
    check_kinds([Scaffold(name="aider", agent=INSTALLED["aider"])], PROMPT_KINDS)


def test_tool_formats_vary_only_where_the_model_has_two() -> None:
    two = RunningProxy("http://127.0.0.1:9", "sqlite:///pool.db", "llama", 1000, tool_formats=2)
    check_tool_formats(two, PROMPT_KINDS)
    one = replace(two, model="tiny", tool_formats=1)
    check_tool_formats(one, ["truncation"])
    with pytest.raises(UserError, match="'tiny', whose chat template offers tools in one way; leave it out"):
        check_tool_formats(one, PROMPT_KINDS)
