"""Engine against trainer: the largest gap is told as it is, and only rank 0 asks the pool."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from sqlalchemy import update

from proxy.pool.completions.records import float_bytes
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts import runs
from proxy.pool.schema import completions
from proxy.pool.training.steps import Published, publish
from proxy.pool.untrained import UntrainedReason
from tests.trainer.make import fill, make_config, make_rows
from trainer.commands.logprobs import compare_logprobs, difference
from trainer.commands.recorded_rows import sampled_by
from trainer.data.packing import pack
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy


def test_a_gap_that_is_no_number_is_not_passed_over(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    policy, rows = Policy(model, make_config(tmp_path), ranks), make_rows(4)
    whole = difference(policy, rows, 64)
    assert whole["logprob_tokens_compared"] == 20 and 0 < whole["max_abs_logprob_diff"] < math.inf
    with torch.no_grad():
        policy.model.output_layer.weight[:] = math.nan
    assert math.isnan(difference(policy, rows, 64)["max_abs_logprob_diff"])


def test_the_other_ranks_compare_what_rank_0_has_read(
    pool: Pool, ranks: Ranks, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On other machines there is no pool: only rank 0 opens it."""
    config = make_config(tmp_path)
    run = runs.open_run(pool, config.run, "train", {})
    version = publish(pool, run.id, Published(step=0, checkpoint="none", hf_dir=str(model), metrics={}))
    fill(pool, run.id, 2, version.name)
    shared = list[Any]()

    def first(_: Ranks, make: Callable[[], Any]) -> Any:
        shared.append(make())
        return shared[-1]

    monkeypatch.setattr(Ranks, "share", first)
    expected = compare_logprobs(config, ranks, config.run)
    assert expected["logprob_tokens_compared"] == 64 and expected["policy_version"] == version.name
    monkeypatch.setattr(Ranks, "share", lambda _, make: shared.pop(0))
    elsewhere = msgspec.structs.replace(config, pool=str(tmp_path / "elsewhere" / "pool.db"))
    assert compare_logprobs(elsewhere, ranks, config.run) == expected


@pytest.mark.parametrize("why", [UntrainedReason.CONSTRAINED, UntrainedReason.SAMPLING_PARAMETERS])
def test_answers_from_another_distribution_are_counted_and_not_compared(
    why: UntrainedReason, pool: Pool, ranks: Ranks, model: Path, tmp_path: Path
) -> None:
    config = make_config(tmp_path)
    run = runs.open_run(pool, config.run, "train", {})
    version = publish(pool, run.id, Published(step=0, checkpoint="none", hf_dir=str(model), metrics={}))
    fill(pool, run.id, 2, version.name, size=1)
    policy = Policy(model, config, ranks)
    for shift, row in enumerate(sampled_by(version.name, config, run.name, Counter())):
        packed, _ = pack([row], policy.shard)
        own = policy.logprobs(packed).tolist()
        values = {"logprobs": float_bytes([logprob + shift for logprob in own]), "untrainable": why if shift else None}
        with pool.write() as connection:
            connection.execute(update(completions).where(completions.c.id == row.completions[0]).values(values))
    found = compare_logprobs(config, ranks, run.name)
    assert found["excluded_tokens"] == {why: 8} and found["logprob_tokens_compared"] == 8
    assert found["max_abs_logprob_diff"] < 1e-4
    with pool.write() as connection:
        connection.execute(update(completions).values(untrainable=why))
    with pytest.raises(UserError, match=f"no completion to compare, which {version.name} alone .*: {{'{why}': 16}}"):
        compare_logprobs(config, ranks, run.name)
