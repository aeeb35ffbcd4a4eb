"""A gradient that is not finite changes nothing: its groups are set aside, and the step goes on with others."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from sqlalchemy import update

from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import rollouts
from proxy.pool.training.steps import Published, drop_batch
from proxy.pool.training.unused_groups import since_last_step
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from proxy.pool.untrained import UntrainedReason
from tests.pool.make import publish_next
from tests.trainer.lives import Lives
from tests.trainer.make import fill
from tests.trainer.test_loop import metrics, prepare, query
from tests.trainer.test_weights import same_files

HUGE = 1e39
"""A reward that a verifier may give and float32 cannot hold: the advantage of its rollout is infinite."""
STATES = "select state, step, reason, detail from groups order by queue_index"


def launch(directory: Path, ranks: int, *settings: str) -> list[str]:
    chosen = [word for setting in settings for word in ("--set", setting)]
    return ["launch", str(directory / "trainer.toml"), "--steps", "1", "--nproc", str(ranks), *chosen]


def spoil(directory: Path, groups: int) -> None:
    """Give the rewarded rollouts of the first groups such a reward, and add two groups as others begin with."""
    pool = open_pool(str(directory / "pool.db"))
    with pool.write() as connection:
        spoiled = (rollouts.c.group_id <= groups) & (rollouts.c.reward == 1)
        connection.execute(update(rollouts).where(spoiled).values(reward=HUGE))
    fill(pool, open_run(pool, "demo", "train", None).id, 2)
    pool.close()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_step_leaves_a_batch_whose_gradient_is_not_finite_and_learns_from_the_next(
    ranks: int, lives: Lives, tmp_path: Path
) -> None:
    rough, smooth = prepare(tmp_path / "rough", groups=2), prepare(tmp_path / "smooth", groups=2)
    spoil(rough, 1)  # of the batch's two groups
    for directory in (rough, smooth):
        assert lives.live(*launch(directory, ranks), ranks=ranks) == [0] * ranks, lives.log_end()
    dropped = ("TOMBSTONE", None, "gradient_not_finite", "step 1")
    assert query(rough, STATES) == [dropped] * 2 + [("CONSUMED", 1, None, None)] * 2
    assert query(rough, "select step from policy_versions") == [(0,), (1,)]
    assert same_files(rough / "out/models/step-000001", smooth / "out/models/step-000001")  # nothing has moved before
    left, right = (metrics(directory)[1] for directory in (rough, smooth))
    assert left["loss"] == right["loss"] and left["grad_norm"] == right["grad_norm"]
    [(event,)] = query(rough, "select detail from events where kind = 'gradient'")
    assert event == "step 1: the gradient norm is nan; groups set aside: 1, 2"


def test_weights_that_are_not_finite_are_told_and_no_batch_is_set_aside(lives: Lives, tmp_path: Path) -> None:
    directory = prepare(tmp_path, groups=2)
    file = directory / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, str(file), metadata={"format": "pt"})
    assert lives.live(*launch(directory, 1, "batch.patience_seconds=1")) == [2]
    error = lives.log.read_text().splitlines()[-1]
    assert error.startswith(
        "error: the weights of step 0 (v1) are not finite, so that no batch can be learned from; go back to a step "
        "before it with `trainer rollback`, or begin with another model"
    )
    assert query(directory, STATES) == [("LEASED", 1, None, None)] * 2


@pytest.mark.long
def test_three_batches_in_a_row_end_the_run_and_the_next_start_takes_others(lives: Lives, tmp_path: Path) -> None:
    directory = prepare(tmp_path, groups=3)
    spoil(directory, 3)
    before = len(lives.log.read_text())
    assert lives.live(*launch(directory, 1, "batch.groups=1")) == [2]
    printed = lives.log.read_text()[before:].splitlines()
    notes = [line for line in printed if line.startswith("warning: ")]
    assert notes == [f"warning: step 1: the gradient norm is nan; groups set aside: {number}" for number in (1, 2, 3)]
    error = printed[-1]
    assert error.startswith("error: the gradients of 3 batches in a row are not finite in step 1; look at their groups")
    assert [row[0] for row in query(directory, STATES)] == ["TOMBSTONE"] * 3 + ["DONE"] * 2
    assert lives.live(*launch(directory, 1, "batch.groups=1")) == [0], lives.log_end()
    assert [row[0] for row in query(directory, STATES)] == ["TOMBSTONE"] * 3 + ["CONSUMED", "DONE"]


def test_only_the_owner_drops_a_batch(pool: Pool) -> None:
    run = open_run(pool, "demo", "train", {})
    publish_next(pool, run.id, Published(step=0, checkpoint="c", hf_dir="", metrics={}))
    fill(pool, run.id, 3)
    rule, why = LeaseRule(groups=1, window=4, max_staleness=9), UntrainedReason.GRADIENT_NOT_FINITE
    first = lease(pool, run.id, 1, rule)
    with pytest.raises(UserError, match="another trainer has taken over"):
        drop_batch(pool, run.id, 1, why, "another")
    assert lease(pool, run.id, 1, rule) == first and first is not None
    assert drop_batch(pool, run.id, 1, why) == [group.group_id for group in first.groups]
    second = lease(pool, run.id, 1, rule)
    assert second is not None and [group.queue_index for group in second.groups] == [1]
    assert drop_batch(pool, run.id, 2, why) == []
    publish_next(pool, run.id, Published(step=1, checkpoint="c1", hf_dir="", metrics={}))
    assert lease(pool, run.id, 2, rule) is not None and since_last_step(pool, run.id) == {}
    assert drop_batch(pool, run.id, 2, why) == [3]
    assert since_last_step(pool, run.id) == {"gradient_not_finite": 1}  # although its rollouts ended before step 1
