"""The list of reasons why something is not trained, and what became of the texts that were stored before it."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from proxy.pool.completions.store import of_attempt, to_row
from proxy.pool.database import open_pool
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.failures import enough_valid
from proxy.pool.schema import groups
from proxy.pool.training.steps import metrics
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.pool.make import new_completion, older_pool

PAGE = Path(__file__).parents[2] / "docs" / "training.md"
from_text = import_module("proxy.pool.migrations.versions.0009_reasons").from_text


def test_the_page_has_the_whole_list() -> None:
    section = PAGE.read_text().partition("## Why a token is not trained")[2].partition("\n## ")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.MULTILINE)) == {
        reason: reason.meaning for reason in UntrainedReason
    }


def test_a_reason_that_is_not_in_the_list_is_refused() -> None:
    assert Untrained.from_columns(None, None) is None
    assert str(Untrained.from_columns("label", "side")) == "label: side"
    with pytest.raises(ValueError, match="bored"):
        Untrained.from_columns("bored", None)


def test_more_than_half_must_be_valid() -> None:
    assert [enough_valid(valid, 4) for valid in range(5)] == [False, False, False, True, True]
    assert enough_valid(1, 1) and not enough_valid(0, 0)


@pytest.mark.parametrize(
    ("text", "reason", "detail"),
    [
        ("abandoned in transport", "abandoned", None),
        ("died: no\nend", "engine_failed", "died: no\nend"),
        ("the engine named the weight version of the first 3 of 5 tokens", "version_missing", "first 3 of 5 tokens"),
        ("sampled with {'top_k': 5}, not from the training distribution", "sampling_parameters", "{'top_k': 5}"),
        ("text only: the provider returned no token ids (it ended by stop)", "text_only", "ended by stop"),
        ("rollout: verifier", "rollout_failed", "verifier"),
        ("rollout: no reward", "no_reward", None),
        ("rollout: no completion of a version of this run", "no_version", None),
        ("stale", "stale", None),
        ("stale: 5 steps behind, 4 allowed", "stale", "5 steps behind, 4 allowed"),
        ("filtered: hung", "group_filtered", "hung"),
        ("1 of 4 rollouts are usable", "too_few_valid", "1 of 4 rollouts are usable"),
    ],
)  # fmt: skip
def test_texts_of_before_have_their_reason(text: str, reason: str, detail: str | None) -> None:
    assert from_text(text) == (reason, detail) and reason in set(UntrainedReason)


def test_a_pool_of_before_is_read_with_reasons(database: str) -> None:
    with older_pool(database, "0008") as add:
        group = {"run_id": 1, "task_id": 1, "size": 2, "created_at": 1.0}
        add("groups", id=1, queue_index=0, state="TOMBSTONE", reason="filtered: hung", **group)
        add("groups", id=2, queue_index=1, state="DONE", **group)
        add("attempts", id=1, number=0, key_hash="0", agent="session", opened_at=1.0)
        newer = {"untrainable_detail", "given", "misfit", "observed", "queued_seconds"}
        row = {name: value for name, value in to_row(new_completion(1)).items() if name not in newer}
        for ordinal, text in enumerate((None, "abandoned in transport", "silent: no token for 5 s")):
            add("completions", **row | {"ordinal": ordinal, "untrainable": text})
        add("policy_versions", id=1, run_id=1, step=0, checkpoint="c", hf_dir="h", created_at=1.0)
        counts = {
            "excluded_tokens": {"label side": 3, "rollout: verifier": 2},
            "masked_tokens": {"negative advantage": 1},
        }
        add("train_steps", id=1, version_id=1, metrics=counts | {"loss": 0.1})
    pool = open_pool(database)
    assert [item.untrainable and str(item.untrainable) for item in of_attempt(pool, 1)] == [
        None, "abandoned", "engine_failed: silent: no token for 5 s",
    ]  # fmt: skip
    assert verify(pool).damages == [] and verify(pool).trainable == 1
    with pool.read() as connection:
        rows = connection.execute(groups.select().order_by(groups.c.id)).all()
    assert [(row.reason, row.detail) for row in rows] == [("group_filtered", "hung"), (None, None)]
    assert json.loads(json.dumps(metrics(pool, 1))) == [
        {
            "step": 0,
            "loss": 0.1,
            "excluded_tokens": {"label: side": 3, "rollout_failed: verifier": 2},
            "masked_tokens": {"negative_advantage": 1},
        }
    ]
    pool.close()
