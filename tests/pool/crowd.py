"""What several harnesses, proxies and trainers do to one pool at the same time; each call is a process of its own."""

import asyncio
import time

from proxy.pool.completions.store import CompletionWriter
from proxy.pool.database import open_pool
from proxy.pool.errors import AttemptClosed
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt, open_session
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group, open_rollouts
from proxy.pool.rollouts.runs import open_run
from proxy.pool.training.steps import Published
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from tests.pool.make import TASK, new_completion, publish_next

RUN = "crowd"
RULE = LeaseRule(groups=2, window=8, max_staleness=99)


def open_groups(url: str, count: int) -> list[int]:
    """A harness: the ids of the groups that it opened."""
    pool = open_pool(url)
    run = open_run(pool, RUN, "train", {"n": 2})
    return [open_group(pool, run.id, TASK, 2)[0].group_id for _ in range(count)]


def finish_members(url: str, member: int) -> None:
    """A harness that brings the rollouts of one place in every group to their outcome."""
    pool = open_pool(url)
    for rollout in open_rollouts(pool, open_run(pool, RUN, "train", None).id):
        if rollout.member == member:
            attempt, _ = open_attempt(pool, rollout.rollout_id, "command")
            asyncio.run(_add(url, attempt.id, 1))
            close_attempt(pool, attempt.id, Ending())
            finish_rollout(pool, rollout.rollout_id, Outcome(attempt_id=attempt.id, reward=float(member)))


def lease_steps(url: str, steps: int) -> list[tuple[int, list[int]]]:
    """A trainer: step and groups of every lease it got."""
    pool = open_pool(url)
    run = open_run(pool, RUN, "train", None)
    got = []
    for step in range(1, steps + 1):
        while (leased := lease(pool, run.id, step, RULE)) is None:
            time.sleep(0.01)
        got.append((step, [group.group_id for group in leased.groups]))
    return got


def publish_steps(url: str, steps: int) -> list[int]:
    """A trainer: the ids of the versions that its steps became."""
    pool = open_pool(url)
    run = open_run(pool, RUN, "train", None)
    done = [Published(step=step, checkpoint="c", hf_dir="h", metrics={}) for step in range(1, steps + 1)]
    return [publish_next(pool, run.id, step).id for step in done]


def open_attempts(url: str, rollout_id: int, count: int) -> list[int]:
    pool = open_pool(url)
    return [open_attempt(pool, rollout_id, "command")[0].id for _ in range(count)]


def write_until_closed(url: str, key: str) -> list[int]:
    """A proxy: the ids of the completions that were taken before the attempt of this key was closed."""
    return asyncio.run(_add(url, open_session(open_pool(url), key).id, None))


async def _add(url: str, attempt_id: int, count: int | None) -> list[int]:
    writer = CompletionWriter(open_pool(url))
    taken: list[int] = []
    while count is None or len(taken) < count:
        try:
            taken += await asyncio.gather(*(writer.add(new_completion(attempt_id)) for _ in range(count or 4)))
        except AttemptClosed:
            break
    await writer.close()
    return taken
