"""What an attempt has used of the model, and what the proxy saw of its calls."""

import time
from array import array
from dataclasses import replace

import pytest
from sqlalchemy import select

from proxy.pool.completions.records import VersionSpan
from proxy.pool.database import Pool
from proxy.pool.inspect.run_status import traffic
from proxy.pool.rollouts.attempts import by_key, open_attempt
from proxy.pool.rollouts.budgets import Budget, calls_seen, last_event, note_spent, note_trouble, spent
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import attempts
from tests.pool.make import TASK, new_completion, record


@pytest.fixture
def attempt_id(pool: Pool) -> int:
    [member] = open_group(pool, open_run(pool, "r", "train", {}).id, TASK, 1)
    attempt, key = open_attempt(pool, member.rollout_id, "command", Budget(turns=2, tokens=7))
    known = by_key(pool, key)
    assert known is not None and known.budget == attempt.budget == Budget(turns=2, tokens=7)
    return attempt.id


def test_turns_are_whole_answers_and_tokens_are_whatever_was_sampled(pool: Pool, attempt_id: int) -> None:
    record(pool, [replace(new_completion(attempt_id), finish_reason="error"), new_completion(attempt_id)])
    assert spent(pool, attempt_id, Budget(turns=2, tokens=7)) is None
    assert spent(pool, attempt_id, Budget(turns=1)) == "turns"
    assert spent(pool, attempt_id, Budget(tokens=4)) == "tokens"
    assert spent(pool, attempt_id, Budget()) is None


def test_given_tokens_use_up_nothing(pool: Pool, attempt_id: int) -> None:
    answer = new_completion(attempt_id, sampled=[3, 4, 5, 6])
    logprobs, versions = array("f", [-0.5, -0.5]), (VersionSpan("v1", 2, 4),)
    record(pool, [replace(answer, given=((0, 2),), logprobs=logprobs, versions=versions)])
    assert spent(pool, attempt_id, Budget(tokens=3)) is None
    assert spent(pool, attempt_id, Budget(tokens=2)) == "tokens"
    counted = traffic(pool, 1, 0).tokens
    assert counted == 2 and type(counted) is int  # PostgreSQL sums wide numbers up to decimals, which JSON has as text


def test_trouble_counts_until_a_call_goes_well(pool: Pool, attempt_id: int) -> None:
    assert (calls_seen(pool, attempt_id).completed, calls_seen(pool, attempt_id).broken) == (0, None)
    record(pool, [new_completion(attempt_id)])
    note_trouble(pool, attempt_id, "engine_busy", 1.0)
    note_trouble(pool, attempt_id, "engine_silent: 60 s", 2.0)
    with pool.read() as connection:
        spans = connection.execute(select(attempts.c.failed_calls).where(attempts.c.id == attempt_id)).scalar_one()
    assert [begin for begin, _ in spans] == [1.0, 2.0] and spans[0][1] <= spans[1][1] <= time.time()
    assert (calls_seen(pool, attempt_id).completed, calls_seen(pool, attempt_id).broken) == (1, "engine_silent: 60 s")
    record(pool, [replace(new_completion(attempt_id), finish_reason="abort", finished_at=time.time() + 50)])
    assert calls_seen(pool, attempt_id).broken == "engine_silent: 60 s"
    record(pool, [replace(new_completion(attempt_id), finished_at=time.time() + 100)])
    assert (calls_seen(pool, attempt_id).completed, calls_seen(pool, attempt_id).broken) == (2, None)
    note_spent(pool, attempt_id, "turns")
    assert calls_seen(pool, attempt_id).spent == "turns"


def test_the_last_event_is_the_end_of_the_newest_call(pool: Pool, attempt_id: int) -> None:
    assert last_event(pool, attempt_id) is None
    record(pool, [replace(new_completion(attempt_id), finished_at=at) for at in (30.0, 20.0)])
    assert last_event(pool, attempt_id) == 30.0
