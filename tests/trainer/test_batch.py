"""From completions to rows to micro-batches: contexts stay exact, and every token that is left out has a reason."""

import math
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sqlalchemy import select, update

from proxy.pool.completions.records import Completion, VersionSpan
from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row
from proxy.pool.functions.weights import weigh
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import completions
from proxy.pool.training.fates import StepSums, Tally, sums
from proxy.pool.training.steps import Published
from proxy.pool.training.windowed_fifo import Lease, LeasedGroup, LeasedRollout, LeaseRule, lease
from proxy.pool.untrained import Untrained, UntrainedReason, to_metrics
from tests.pool.make import finished_group, new_completion, publish_next
from tests.trainer.make import chain, make_config, make_rows, write_model
from trainer.config import Credit, Loss
from trainer.config.step import StepOptions
from trainer.data.assemble import assemble, merge, why_not_imitable, why_not_trainable
from trainer.data.packing import ContextShard, pack, plan
from trainer.data.row import TrainingRow
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import policy_loss
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy

FAILED = Untrained(UntrainedReason.ROLLOUT_FAILED, "verifier")
GROWING = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7]), ([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11])]
REWRITTEN = [([1, 2, 3], [4, 5]), ([1, 2, 9], [7, 8]), ([1, 2, 3, 4, 5, 6], [7])]


def merged(completions: list[Completion]) -> tuple[list[TrainingRow], Counter[Untrained]]:
    excluded: Counter[Untrained] = Counter()
    return merge(completions, 1.0, excluded, why_not_trainable), excluded


def test_a_growing_history_is_one_sequence() -> None:
    rows, excluded = merged(chain(GROWING))
    assert [row.tokens.tolist() for row in rows] == [list(range(1, 12))]
    assert np.flatnonzero(rows[0].trained).tolist() == [3, 4, 6, 9, 10] and not excluded


def test_a_rewritten_history_is_a_sequence_of_its_own() -> None:
    rows, _ = merged(chain(REWRITTEN))
    assert [row.tokens.tolist() for row in rows] == [[1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 7, 8]]
    assert [int(row.trained.sum()) for row in rows] == [3, 2]


def test_rollout_logprobs_stay_with_their_tokens() -> None:
    completions = chain(GROWING)
    rows, _ = merged(completions)
    expected = [value for item in completions for value in item.logprobs]
    assert rows[0].rollout_logp[rows[0].trained].tolist() == expected


def test_what_is_not_trained_is_counted_by_reason() -> None:
    first, second, third = chain(GROWING)
    second = replace(second, untrainable=Untrained(UntrainedReason.SAMPLING_PARAMETERS, "temperature 0"))
    third = replace(third, logprobs=array("f", [-1.0, -math.inf]))
    rows, excluded = merged([first, second, third])
    assert to_metrics(excluded) == {"sampling_parameters: temperature 0": 1, "logprob_not_finite": 1}
    assert np.flatnonzero(rows[0].trained).tolist() == [3, 4, 9] and np.isfinite(rows[0].rollout_logp).all()


def test_a_rollout_of_weight_two_counts_as_if_it_were_there_twice() -> None:
    def rows(weight: float) -> list[TrainingRow]:
        members = [LeasedRollout(n, n, float(n % 2), None, chain(GROWING[:1], n + 1)) for n in range(2)]
        members[1] = replace(members[1], weight=weight)
        return assemble([LeasedGroup(1, 0, {}, 0, members)], StepOptions()).rows

    plain, weighed = rows(1.0), rows(2.0)
    assert [row.weight for row in plain] == pytest.approx([1.0, 1.0])
    assert weighed[1].weight == pytest.approx(2 * weighed[0].weight)
    assert [row.advantage.tolist() for row in weighed] == [row.advantage.tolist() for row in plain]


def test_leaving_out_notes_by_a_function_trains_what_labels_without_them_train(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    publish_next(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    finished_group(pool, run.id, [0.0, 1.0])
    with pool.write() as connection:
        connection.execute(update(completions).values(label="main"))
        for attempt_id in list(connection.scalars(select(completions.c.attempt_id))):
            note = to_row(new_completion(attempt_id)) | {
                "ordinal": 1,
                "versions": [["v1", 0, 2]],
                "label": "compaction",
            }
            insert_row(connection, completions, note)

    def leased() -> Lease:
        taken = lease(pool, run.id, 1, LeaseRule(groups=1, window=1, max_staleness=5))
        assert taken is not None
        return taken

    whole = assemble(leased().groups, StepOptions())
    by_label = assemble(leased().groups, StepOptions(labels=("main",)))
    assert weigh(pool, run.id, leased(), "examples.batch_function:without_notes")
    by_function = assemble(leased().groups, StepOptions())
    assert [row.completions for row in by_function.rows] == [row.completions for row in by_label.rows] == [(1,), (2,)]
    for one, other in zip(by_function.rows, by_label.rows, strict=True):
        assert one.weight == other.weight and one.tokens.tolist() == other.tokens.tolist()
        assert one.advantage.tolist() == other.advantage.tolist() and one.trained.tolist() == other.trained.tolist()
    assert to_metrics(by_function.excluded) == {"function: examples.batch_function:without_notes": 4}
    assert to_metrics(by_label.excluded) == {"label: compaction": 4} and whole.tokens == 2 * by_function.tokens


def test_given_tokens_are_context_only() -> None:
    first, second, third = chain(GROWING)
    third = replace(third, given=((0, 1),), logprobs=array("f", [-1.5]), versions=(VersionSpan("v1", 1, 2),))
    rows, excluded = merged([first, second, third])
    assert to_metrics(excluded) == {"given": 1}
    assert np.flatnonzero(rows[0].trained).tolist() == [3, 4, 6, 10]
    assert rows[0].rollout_logp.tolist()[8:] == [0, 0, -1.5] and rows[0].segment.tolist()[9:] == [0, 2]


def test_side_calls_are_counted_and_what_has_no_label_is_trained() -> None:
    labels: list[str | None] = ["side", None, "compaction"]
    items = [replace(item, label=label) for item, label in zip(chain(GROWING), labels, strict=True)]
    rows, excluded = merged(items)
    assert to_metrics(excluded) == {"label: side": 2} and np.flatnonzero(rows[0].trained).tolist() == [6, 9, 10]
    members = [LeasedRollout(i, i, float(i), None, items) for i in range(2)]
    batch = assemble([LeasedGroup(1, 0, {}, 0, members)], StepOptions(labels=("main", "side")))
    assert to_metrics(batch.excluded) == {"label: compaction": 4} and batch.tokens == 6


def test_imitation_needs_no_logprobs_but_a_finished_reply() -> None:
    first, second, _ = chain(GROWING)
    teacher = [
        replace(first, logprobs=array("f"), untrainable=Untrained(UntrainedReason.TEXT_ONLY)),
        replace(second, finish_reason="length"),
    ]
    excluded: Counter[Untrained] = Counter()
    rows = merge(teacher, 1.0, excluded, why_not_imitable)
    assert [int(row.trained.sum()) for row in rows] == [2] and to_metrics(excluded) == {"unfinished: length": 1}


def test_a_whole_reply_that_its_client_did_not_receive_is_not_imitated() -> None:
    first, second, _ = chain(GROWING)
    lost = replace(second, untrainable=Untrained(UntrainedReason.ABANDONED))
    excluded: Counter[Untrained] = Counter()
    rows = merge([first, lost], 1.0, excluded, why_not_imitable)
    assert [int(row.trained.sum()) for row in rows] == [2] and to_metrics(excluded) == {"abandoned": 1}


def test_stored_tokens_that_changed_are_excluded() -> None:
    first, second, _ = chain(GROWING)
    rows, excluded = merged([first, replace(second, path_crc=0)])
    assert rows == [] and to_metrics(excluded) == {"checksum": 3}


def group(rewards: list[float | None]) -> LeasedGroup:
    members = [
        LeasedRollout(index, index, reward, None if reward is not None else FAILED, chain(GROWING))
        for index, reward in enumerate(rewards)
    ]
    return LeasedGroup(1, 0, {}, 0, members)


def test_members_without_a_verdict_and_equal_groups_are_left_out() -> None:
    batch = assemble([group([1.0, 0.0, None]), group([1.0, 1.0])], StepOptions())
    assert batch.tokens == 10 and batch.dropped_groups == 1
    assert to_metrics(batch.excluded) == {"rollout_failed: verifier": 5, "equal_rewards": 10}
    assert batch.rewards == [1.0, 0.0, 1.0, 1.0]


def test_each_answer_has_a_fate_and_the_counts_are_their_sums() -> None:
    first, second, third = chain(GROWING)
    third = replace(third, given=((0, 1),), logprobs=array("f", [-math.inf]), versions=(VersionSpan("v1", 1, 2),))
    odd = [replace(first, label="side"), second, third]
    rewards = [1.0, 0.0, None]
    members = [LeasedRollout(n, n, r, None if r is not None else FAILED, odd) for n, r in enumerate(rewards)]
    batch = assemble([LeasedGroup(7, 0, {}, 0, members)], StepOptions(loss=Loss(negative_weight=0.0)))
    positive, negative, failed = [fate.to_pool() for fate in batch.fates]
    assert [(item.trained, to_metrics(item.left_out)) for item in positive.completions] == [
        (0, {"label: side": 2}),
        (1, {}),
        (0, {"given": 1, "logprob_not_finite": 1}),
    ]
    assert to_metrics(negative.completions[1].left_out) == {"negative_advantage": 1} and positive.why is None
    assert failed.why == FAILED and to_metrics(failed.completions[2].left_out) == {
        "rollout_failed: verifier": 1,
        "given": 1,
    }
    assert to_metrics(batch.masked) == {"negative_advantage": 1} and batch.tokens == 2
    total = sums([positive, negative, failed])
    assert total.trained == Tally(1, 1, 1) and total.left_out["given"] == Tally(1, 3, 3)
    assert sum(tally.tokens for tally in total.left_out.values()) + 1 == 3 * 5
    assert StepSums.from_json(total.to_json()) == total


def test_a_path_over_the_budget_is_trained_as_far_as_it_fits_and_its_reward_counts() -> None:
    groups = [group([1.0, 0.0, 0.5])]
    assert {row.inputs for row in assemble(groups, StepOptions(max_tokens=10)).rows} == {10}
    batch, whole = assemble(groups, StepOptions(max_tokens=9)), assemble(groups, StepOptions())
    assert to_metrics(batch.excluded) == {"too_long": 6} and batch.tokens == 9 and batch.rewards == [1.0, 0.0, 0.5]
    assert [row.tokens.tolist() for row in batch.rows] == [list(range(1, 8))] * 3  # without the last completion
    for short, long in zip(batch.rows, whole.rows, strict=True):
        assert (short.advantage[short.trained] == long.advantage[short.places]).all()
    assert sum(len(micro) for rank in plan(batch.rows, 2, 9) for micro in rank) == 3  # as trees, over two ranks
    nothing = assemble(groups, StepOptions(max_tokens=3))
    assert nothing.rows == [] and to_metrics(nothing.excluded) == {"too_long": 15} and nothing.dropped_groups == 0


def test_the_control_run_keeps_reported_rewards() -> None:
    options = StepOptions(credit=Credit(shuffle_rewards=True))
    batches = [assemble([replace(group([1.0, 0.0, 0.0, 0.0]), group_id=number)], options) for number in range(9)]
    winners = {int(np.argmax([row.advantage.max() for row in batch.rows])) for batch in batches}
    assert len(winners) > 1 and all(batch.rewards == [1.0, 0.0, 0.0, 0.0] for batch in batches)


def gradients(policy: Policy, micros: list[list[TrainingRow]], denominator: int) -> dict[str, torch.Tensor]:
    """The loss and every parameter's gradient as Megatron's DDP accumulates it."""
    policy.ddp.zero_grad_buffer()
    total = torch.zeros((), device=policy.shard.device)
    for rows in micros:
        packed, tokens = pack(rows, policy.shard)
        loss = policy_loss(policy.ddp(packed)[packed.branches], tokens, rule_of("cispo", 0.0, 5.0))[0] / denominator
        loss.backward()
        total += loss.detach()
    return {name: param.main_grad.clone() for name, param in policy.model.named_parameters()} | {"loss": total}


def close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(
        right[name].norm() > 0 and (left[name] - right[name]).norm() <= 1e-5 * right[name].norm() for name in right
    )


@pytest.mark.parametrize("history", [GROWING, REWRITTEN], ids=["growing", "rewritten"])
def test_merged_sequences_give_the_gradient_of_separate_completions(
    history: list[tuple[list[int], list[int]]], ranks: Ranks, tmp_path: Path
) -> None:
    completions = chain(history)
    policy = Policy(write_model(tmp_path / "model"), make_config(tmp_path), ranks)
    together, _ = merged(completions)
    separate = [row for item in alone(history) for row in merged([item])[0]]
    assert sum(row.inputs for row in together) < sum(row.inputs for row in separate)
    assert close(gradients(policy, [together], 5), gradients(policy, [separate], 5))


def alone(history: list[tuple[list[int], list[int]]]) -> list[Completion]:
    """The same completions, each as if it were its attempt's only one."""
    return [chain([pair])[0] for pair in history]


def test_the_gradient_is_the_same_for_any_split_into_micro_batches(ranks: Ranks, tmp_path: Path) -> None:
    policy = Policy(write_model(tmp_path / "model"), make_config(tmp_path), ranks)
    rows = make_rows(12)
    whole = gradients(policy, [rows], 60)
    assert close(gradients(policy, plan(rows, 1, 80)[0], 60), whole)
    assert close(gradients(policy, [[row] for row in rows] + [[]], 60), whole)


def test_rows_weigh_what_the_normalisation_gives_them() -> None:
    groups = [group([1.0, 0.0])]
    for loss in (Loss(norm="token"), Loss(norm="rollout"), Loss(norm="constant", norm_constant=7.0)):
        batch = assemble(groups, StepOptions(loss=loss))
        total = sum(row.weight * int(row.trained.sum()) for row in batch.rows) / batch.tokens
        assert total == pytest.approx(1.0 if loss.norm != "constant" else batch.tokens / (2 * 7.0))


def test_long_failures_are_masked_and_to_metrics() -> None:
    batch = assemble([group([1.0, 0.0])], StepOptions(loss=Loss(negative_longest=4)))
    assert batch.tokens == 10 and sorted({float(row.advantage[row.trained].min()) for row in batch.rows})[0] == 0.0
    assert to_metrics(batch.masked) == {"negative_advantage": 5}


def test_ratios_over_completions_are_the_same_in_one_micro_batch_and_in_many() -> None:
    rows = [row for item in ([1.0, 0.0], [0.5, 0.2]) for row in assemble([group(list(item))], StepOptions()).rows]
    rule, device = rule_of("gspo", 0.8, 1.2), torch.device("cpu")

    def loss(part: list[TrainingRow]) -> torch.Tensor:
        _, tokens = pack(part, ContextShard(device))
        return policy_loss(tokens.rollout_logp + 0.1 * tokens.advantage, tokens, rule)[0]

    torch.testing.assert_close(torch.stack([loss([row]) for row in rows]).sum(), loss(rows))
