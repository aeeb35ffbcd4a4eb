"""Finished rollouts read back, and the list of failures."""

from proxy.pool.database import Pool
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.training.finished_rollouts import finished_rollouts
from tests.pool.make import TASK, finished_group


def test_finished_rollouts_come_back_with_their_completions(pool: Pool) -> None:
    run = open_run(pool, "r", "collect", {})
    ids = finished_group(pool, run.id, [1.0, None])
    open_group(pool, run.id, TASK, 2)
    recorded = finished_rollouts(pool, run.id)
    assert [(item.rollout_id, item.reward, item.failure) for item in recorded] == [
        (ids[0], 1.0, None),
        (ids[1], None, "verifier"),
    ]
    assert [len(item.completions) for item in recorded] == [1, 1]
