"""Several processes on one pool: nothing is numbered twice, leased twice, or taken after the end."""

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
from sqlalchemy import select

from proxy.pool.completions.store import of_attempt
from proxy.pool.database import Pool
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_session
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import attempts, groups, policy_versions
from proxy.pool.training.steps import Published, publish
from tests.pool import crowd
from tests.pool.make import TASK


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(4, mp_context=get_context("spawn")) as executor:
        yield executor


def test_harnesses_and_trainers_share_a_run(pool: Pool, processes: ProcessPoolExecutor) -> None:
    opened = [processes.submit(crowd.open_groups, pool.url, 4) for _ in range(3)]
    ids = [group_id for job in opened for group_id in job.result()]
    run = open_run(pool, crowd.RUN, "train", None)
    publish(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    finishing = [processes.submit(crowd.finish_members, pool.url, member) for member in (0, 1)]
    training = [processes.submit(crowd.lease_steps, pool.url, 6) for _ in range(2)]
    for job in finishing:
        job.result()
    first, second = (job.result() for job in training)
    assert first == second and sorted(group for _, step in first for group in step) == sorted(ids)
    publishing = [processes.submit(crowd.publish_steps, pool.url, 6) for _ in range(2)]
    assert publishing[0].result() == publishing[1].result()
    with pool.read() as connection:
        rows = connection.execute(select(groups.c.queue_index, groups.c.state).order_by(groups.c.queue_index)).all()
        steps = connection.scalars(select(policy_versions.c.step).order_by(policy_versions.c.id)).all()
    assert [tuple(row) for row in rows] == [(index, "CONSUMED") for index in range(12)]
    assert steps == list(range(7))


def test_attempts_at_one_rollout_are_numbered_once(pool: Pool, processes: ProcessPoolExecutor) -> None:
    [rollout] = open_group(pool, open_run(pool, "r", "train", {}).id, TASK, 1)
    jobs = [processes.submit(crowd.open_attempts, pool.url, rollout.rollout_id, 5) for _ in range(4)]
    ids = {attempt for job in jobs for attempt in job.result()}
    with pool.read() as connection:
        numbers = connection.scalars(select(attempts.c.number).order_by(attempts.c.number)).all()
    assert len(ids) == 20 and numbers == list(range(20))


def test_proxies_share_an_attempt_until_it_is_closed(pool: Pool, processes: ProcessPoolExecutor) -> None:
    jobs = [processes.submit(crowd.write_until_closed, pool.url, "shared") for _ in range(3)]
    attempt = open_session(pool, "shared")
    while len(of_attempt(pool, attempt.id)) < 60:
        time.sleep(0.01)
    close_attempt(pool, attempt.id, Ending())
    at_the_end = [item.id for item in of_attempt(pool, attempt.id)]
    acknowledged = [completion for job in jobs for completion in job.result()]
    stored = of_attempt(pool, attempt.id)
    assert [item.id for item in stored] == at_the_end
    assert [item.ordinal for item in stored] == list(range(len(stored)))
    assert set(acknowledged) <= set(at_the_end) and len(acknowledged) == len(set(acknowledged))
