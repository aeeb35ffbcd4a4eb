"""Small pools for the tests: completions whose tokens a reader can check by eye."""

import asyncio
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from zlib import crc32

from sqlalchemy import MetaData, create_engine, insert

from proxy.pool.completions.records import NewCompletion, VersionSpan, int_bytes
from proxy.pool.completions.store import CompletionWriter, to_row
from proxy.pool.database import Pool, insert_row, upgrade
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.schema import completions
from proxy.pool.training.steps import Published, Version, publish, versions

TASK = {"id": "t", "instruction": "do it", "domain": "agent"}


def new_completion(attempt_id: int, prompt: Sequence[int] = (1, 2), sampled: Sequence[int] = (3, 4)) -> NewCompletion:
    """A trainable completion without a prefix, sampled by version v1."""
    return NewCompletion(
        attempt_id=attempt_id,
        prompt_tail=array("i", prompt),
        sampled=array("i", sampled),
        logprobs=array("f", [-0.5] * len(sampled)),
        versions=(VersionSpan("v1", 0, len(sampled)),),
        finish_reason="stop",
        reply={"role": "assistant", "content": "ok"},
        path_crc=crc32(int_bytes([*prompt, *sampled])),
        started_at=time.time(),
        finished_at=time.time(),
    )


def publish_next(pool: Pool, run_id: int, done: Published) -> Version:
    """Publish a step that grew from the one before it."""
    before = [version.id for version in versions(pool, run_id) if version.step < done.step]
    return publish(pool, run_id, replace(done, parent=before[-1] if before else None))


def record(pool: Pool, items: Sequence[NewCompletion]) -> list[int]:
    """Store completions as the proxy does; their ids."""

    async def write() -> list[int]:
        writer = CompletionWriter(pool)
        ids = [await writer.add(item) for item in items]
        await writer.close()
        return ids

    return asyncio.run(write())


@contextmanager
def older_pool(database: str, revision: str) -> Iterator[Callable[..., None]]:
    """Make a pool of an older schema with run 1 and its task 1, and yield what adds a row to one of its tables."""
    engine = create_engine(database)
    with engine.begin() as connection:
        upgrade(connection, revision)
        tables = MetaData()
        tables.reflect(connection)

        def add(table: str, **values: object) -> None:
            connection.execute(insert(tables.tables[table]).values(values))

        add("runs", id=1, name="r", purpose="train", config={}, created_at=1.0)
        add("tasks", id=1, run_id=1, name="t", domain="agent", spec=TASK)
        yield add
    engine.dispose()


def finished_group(
    pool: Pool, run_id: int, rewards: Sequence[float | None], version: str | Sequence[str] = "v1"
) -> list[int]:
    """A group whose members each made one completion and got these rewards. Returns the rollout ids.

    `version`: which weights sampled it, or those of each member.
    """
    members = open_group(pool, run_id, TASK, len(rewards))
    sampled_by = [version] * len(rewards) if isinstance(version, str) else version
    for member, reward, version in zip(members, rewards, sampled_by, strict=True):
        attempt, _ = open_attempt(pool, member.rollout_id, "command")
        row = to_row(new_completion(attempt.id)) | {"ordinal": 0, "versions": [[version, 0, 2]]}
        with pool.write() as connection:
            insert_row(connection, completions, row)
        close_attempt(pool, attempt.id, Ending())
        failure = "verifier" if reward is None else None
        finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=reward, failure=failure))
    return [member.rollout_id for member in members]
