"""The account of a run's calls by client: which can train, and why the others cannot."""

from dataclasses import replace
from typing import Any

import pytest

from harness.monitor.progress import calls_table, make_console
from proxy.pool.database import open_pool
from proxy.pool.inspect.trainable_calls import trainable_calls
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import GroupOptions, OpenRollout, Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.pool.make import TASK, new_completion, record


def test_every_call_counts_once_with_its_reason(database: str, capsys: pytest.CaptureFixture[str]) -> None:
    pool = open_pool(database)
    run_id = open_run(pool, "r", "train", None).id

    def attempt(rollout: OpenRollout, agent: str, *reasons: UntrainedReason | None, failure: str | None = None) -> int:
        opened, _ = open_attempt(pool, rollout.rollout_id, agent)
        items = [new_completion(opened.id, sampled=(3, 4, 5)) for _ in reasons]
        record(pool, [
            replace(item, untrainable=None if why is None else Untrained(why, "detail"))
            for item, why in zip(items, reasons, strict=True)
        ])  # fmt: skip
        close_attempt(pool, opened.id, Ending(failure=failure))
        return opened.id

    def finish(rollout: OpenRollout, attempt_id: int, reward: float | None, **values: Any) -> None:
        finish_rollout(pool, rollout.rollout_id, Outcome(attempt_id=attempt_id, reward=reward, **values))

    abandoned, failed = UntrainedReason.ABANDONED, UntrainedReason.ENGINE_FAILED
    good, masked = open_group(pool, run_id, TASK, 2, GroupOptions(agent="codex"))
    attempt(good, "codex", None, failed, failure="engine")
    finish(good, attempt(good, "codex", None, None, abandoned), 1.0)
    finish(masked, attempt(masked, "codex", None), None, failure="verifier")
    alone, unfinished = open_group(pool, run_id, TASK, 2, GroupOptions(agent="mini"))
    finish(alone, attempt(alone, "mini", None, None), 0.5)
    attempt(unfinished, "mini", None, failure="interrupted")
    other = open_group(pool, open_run(pool, "other", "train", None).id, TASK, 1)[0]
    attempt(other, "mini", None)

    clients = trainable_calls(pool, run_id)
    codex, mini = clients["codex"], clients["mini"]
    assert (codex.calls, codex.tokens, codex.retried_tokens) == (6, 18, 6)
    assert codex.trainable == 0 and {str(why): count for why, count in codex.untrained.items()} == {
        "retried": 1, "engine_failed": 1, "abandoned": 1, "rollout_failed: verifier": 1, "too_few_valid": 2,
    }  # fmt: skip
    assert (mini.calls, mini.trainable, mini.retried_tokens) == (3, 2, 3)
    assert mini.untrained == {Untrained(UntrainedReason.RETRIED): 1}
    make_console().print(calls_table(clients))
    _, *lines = [line.split() for line in capsys.readouterr().out.splitlines() if "%" in line]
    assert lines == [["mini", "3", "67%", "9", "3", "1", "retried"]]
    pool.close()
