"""Whatever histories the pool holds, a step learns from them what separate training of each completion learns.

Agents grow their history, drop turns of it, shorten tool results, sample one prompt twice, ask sub-agents and begin
again from a summary. The reference takes each completion by itself, in the context that it was sampled in.
"""

import random
from pathlib import Path

import numpy as np
import pytest

from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row
from proxy.pool.rollouts import runs
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.schema import completions
from proxy.pool.training import steps, windowed_fifo
from tests.trainer.make import VOCABULARY, chain, make_config, write_model
from tests.trainer.test_tree import distance, gradients
from trainer.config.step import StepOptions
from trainer.credit.advantages import group_relative
from trainer.data.assemble import assemble
from trainer.data.packing import plan
from trainer.data.row import TrainingRow
from trainer.data.tree import distinct
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy

SIZE, GROUPS = 4, 2
Call = tuple[list[int], list[int]]
"""A prompt, and the tokens sampled from it."""


def history(system: list[int], task: list[int], draw: random.Random) -> list[Call]:
    """The calls of one attempt: every kind of history that agents make."""

    def some(count: int) -> list[int]:
        return [draw.randrange(VOCABULARY) for _ in range(count)]

    opening = system + task
    first, result, second = some(6), some(5), some(7)
    grown = opening + first + result
    asked = some(9)  # a sub-agent, with a prompt of its own
    inner, inner_result = some(4), some(3)
    third = grown + second + some(4)
    summary = some(8)
    begun_again = system + summary + some(2)
    return [
        (opening, first),
        (grown, second),
        (asked, inner),
        (asked + inner + inner_result, some(5)),
        (third, some(3)),
        (third, some(6)),  # the same prompt again
        (opening + first + result[:2], some(4)),  # a tool result was shortened
        (opening + second, some(4)),  # a turn was dropped
        (third + some(3), summary),  # compaction
        (begun_again, some(6)),
    ]


def record(pool: Pool, run_id: int) -> list[list[list[Call]]]:
    """[group][member] -> its calls, all of them recorded, finished and rewarded."""
    draw, groups = random.Random(7), []
    for _ in range(GROUPS):
        system, task = ([draw.randrange(VOCABULARY) for _ in range(count)] for count in (12, 6))
        histories = [history(system, task, draw) for _ in range(SIZE)]
        groups.append(histories)
        for member, calls in zip(open_group(pool, run_id, {"id": "t"}, SIZE), histories, strict=True):
            attempt, _ = open_attempt(pool, member.rollout_id, "command")
            ids: dict[int | None, int] = {}
            for item in chain(calls, attempt.id):
                row = to_row(item) | {"ordinal": item.ordinal, "prefix_of": ids.get(item.prefix_of)}
                with pool.write() as connection:
                    ids[item.id] = insert_row(connection, completions, row)
            finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=reward(member.member)))
    return groups


def reward(member: int) -> float:
    return float(member == 0) + 0.25 * member


def separate(groups: list[list[list[Call]]]) -> list[TrainingRow]:
    """One row per completion."""
    scores = group_relative([reward(member) for member in range(SIZE)], "grpo")
    assert scores is not None
    rows = []
    for histories in groups:
        for score, calls in zip(scores, histories, strict=True):
            for item, (prompt, sampled) in zip(chain(calls), calls, strict=True):
                tokens = np.array([*prompt, *sampled], dtype=np.int64)
                trained = np.arange(len(tokens)) >= len(prompt)
                logp = np.zeros(len(tokens), dtype=np.float32)
                logp[trained] = item.logprobs
                assert score is not None
                advantage = np.full(len(tokens), score, dtype=np.float32)
                rows.append(TrainingRow(tokens, trained, logp, advantage, np.zeros_like(tokens)))
    return rows


@pytest.mark.parametrize("budget", [120, 10_000])
def test_a_step_on_any_history_learns_what_its_completions_teach(
    budget: int, pool: Pool, ranks: Ranks, tmp_path: Path
) -> None:
    run = runs.open_run(pool, "demo", "train", {})
    steps.publish(pool, run.id, steps.Published(step=0, checkpoint="", hf_dir="", metrics={}))
    expected = separate(record(pool, run.id))
    rule = windowed_fifo.LeaseRule(groups=GROUPS, window=GROUPS, max_staleness=4)
    lease = windowed_fifo.lease(pool, run.id, 1, rule)
    assert lease is not None
    batch = assemble(lease.groups, StepOptions())
    assert not batch.excluded and batch.tokens == sum(int(row.trained.sum()) for row in expected)
    # In the model of seed 0 the terms of the loss nearly cancel, so that rounding alone is over the bound below.
    policy = Policy(write_model(tmp_path / "model", seed=1), make_config(tmp_path), ranks)
    flat = gradients(policy, [[row] for row in expected], "cispo", merge=False)
    (micros,) = plan(batch.rows, 1, budget)
    assert distance(gradients(policy, micros, "cispo", merge=True), flat) <= 1e-5
    assert distinct(batch.rows) < 0.6 * sum(row.inputs for row in expected)
