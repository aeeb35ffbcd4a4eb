"""A harness that waits for its trainer reads the pool rarely, and soon again when something has changed."""

import asyncio

import pytest

from harness.async_pool import AsyncPool
from harness.monitor import trainer_watch
from harness.monitor.trainer_watch import LONGEST_POLL_SECONDS, POLL_SECONDS, TrainerWatch
from proxy.pool.database import Pool
from proxy.pool.rollouts.runs import admission, open_run, set_queue_limit

SECONDS = 120


async def test_a_waiting_run_is_read_ever_more_rarely_until_something_changes(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, reads = 0.0, list[float]()

    def counted(pool: Pool, run_id: int) -> object:
        reads.append(now)
        return admission(pool, run_id)

    monkeypatch.setattr(trainer_watch, "admission", counted)
    monkeypatch.setattr(trainer_watch, "monotonic", lambda: now)
    run_id = open_run(pool, "r", "train", {}).id
    watch = TrainerWatch(AsyncPool(pool), run_id)
    while now < SECONDS:
        both = await asyncio.gather(watch.latest(), watch.latest())
        assert both[0].queue_limit is None and both[1].room == 0
        now += watch.pause()
    assert reads[0] == reads[1] and len(set(reads)) == len(reads) - 1  # all who wait share one look
    gaps = [after - before for before, after in zip(reads, reads[1:], strict=False)]
    assert gaps[1] == pytest.approx(POLL_SECONDS) and gaps[-1] == pytest.approx(LONGEST_POLL_SECONDS, abs=POLL_SECONDS)
    assert len(reads) < SECONDS
    set_queue_limit(pool, run_id, 3)
    changed_at = now
    while (await watch.latest()).room != 3:
        now += watch.pause()
    assert now - changed_at <= LONGEST_POLL_SECONDS
    set_queue_limit(pool, run_id, 4)
    assert (await watch.look()).room == 4  # at once where it must be known
    now += watch.pause()
    assert watch.pause(0.1) == 0.1
    assert (await watch.latest()).room == 4 and reads[-1] == now and watch.pause() == pytest.approx(POLL_SECONDS)
