"""Metrics of a step on cases worked by hand, exporters, and the record of its tokens."""

import math
import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from proxy.pool.behaviour.statistics import of_rollout
from proxy.pool.completions.observed import Observed
from proxy.pool.completions.records import VersionSpan
from proxy.pool.errors import UserError
from proxy.pool.settings_file import checked
from proxy.pool.training.steps import Version
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.pool.behaviour.test_statistics import worked
from tests.trainer.make import chain, make_config, make_rows, write_model
from tests.trainer.test_weights import same_files
from trainer.config.model_shape import ExpertShape, ModelShape
from trainer.config.monitor import BEHAVIOUR, FAMILIES, OWN, SCALARS, known, own
from trainer.config.report import Report
from trainer.config.step import StepOptions
from trainer.data.assemble import assemble
from trainer.data.packing import plan
from trainer.data.row import TrainingRow
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import LossSums, LossTokens, policy_loss
from trainer.megatron.mtp.loss import DraftMetrics
from trainer.megatron.parallel import Ranks
from trainer.monitor.figures import flat
from trainer.monitor.rollouts import own_figures
from trainer.policy import LossInput, Policy, Update
from trainer.report import tokens
from trainer.report.describe import MetricsContext, StepFacts, describe, lags, lengths, line
from trainer.report.exporters import TensorBoard, scalars
from trainer.report.flops import Workload, flops, merged, peak, separate
from trainer.report.gradients import gradient_shares, token_arrays, token_notes
from trainer.report.tokens import TokenNotes

FAILED = Untrained(UntrainedReason.ROLLOUT_FAILED, "verifier")
TURNS = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6], [7]), ([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11])]
SHAPE = ModelShape("qwen3", 2, 8, 16, 2, 1, 4, 32, 64, 1e-6, False, {})


def rollout(number: int, reward: float | None, turns: int = 3, version: str = "v1") -> LeasedRollout:
    """Turn k of rollout n is completion 10 n + k; it was sampled by one version."""
    items = [
        replace(item, id=10 * number + item.id, prefix_of=item.prefix_of and 10 * number + item.prefix_of)
        for item in chain(TURNS[:turns])
    ]
    spans = [replace(item, versions=(VersionSpan(version, 0, len(item.sampled)),)) for item in items]
    return LeasedRollout(number, number, reward, None if reward is not None else FAILED, spans)


def group(*members: LeasedRollout, staleness: int = 0, domain: str = "agent") -> LeasedGroup:
    return LeasedGroup(1, 0, {"domain": domain}, staleness, list(members))


def facts_of(groups: Sequence[LeasedGroup], step: int = 3) -> StepFacts:
    batch = assemble(groups, StepOptions(step=step))
    micros = plan(batch.rows, 1, 1000)
    seen = {
        id(row): TokenNotes(row.rollout_logp[row.places] + np.float32(0.1), row.advantage[row.places])
        for row in batch.rows
    }
    update = Update(loss=0.5, grad_norm=2.0, learning_rate=1e-3, sums=None)
    return StepFacts(step, groups, batch, micros, update, seen, {}, {"train": 2.0})


def metrics_of(groups: Sequence[LeasedGroup], **setting: Any) -> dict[str, Any]:
    return describe(facts_of(groups), MetricsContext(shape=SHAPE, versions={"v0": 0, "v1": 1, "v2": 2}, **setting))


def test_every_sampled_token_is_trained_or_has_a_reason() -> None:
    first, second, third = (rollout(n, reward) for n, reward in ((1, 1.0), (2, 0.0), (3, None)))
    side = replace(second.completions[1], label="side")
    second = replace(second, completions=[second.completions[0], side, second.completions[2]])
    odd = replace(first.completions[2], logprobs=array("f", [-1.0, -math.inf]))
    first = replace(first, completions=[*first.completions[:2], odd])
    metrics = metrics_of([group(first, second, third), group(rollout(4, 1.0), rollout(5, 1.0))])
    assert metrics["sampled_tokens"] == 25 and metrics["trained_tokens"] == 8
    assert metrics["excluded_tokens"] == {
        "label: side": 1,
        "logprob_not_finite": 1,
        "rollout_failed: verifier": 5,
        "equal_rewards": 10,
    }
    assert metrics["unaccounted_tokens"] == 0


def test_a_steps_line_names_what_is_excluded_and_what_is_masked() -> None:
    groups = [group(rollout(1, 1.0), replace(rollout(2, 0.0), staleness=3), rollout(3, 0.0), rollout(4, None))]
    facts = replace(facts_of(groups), batch=assemble(groups, StepOptions(step=3, max_staleness=2)))
    text = line(Version(3, 1, 3, "", "", None, 0.0), describe(facts, MetricsContext(shape=SHAPE)))
    assert "  tokens 15  (5 not trained: rollout_failed: verifier)  (5 masked: stale)  loss " in text


def test_rewards_are_told_by_domain_and_missing_ones_are_not_counted() -> None:
    metrics = metrics_of(
        [group(rollout(1, 1.0), rollout(2, 0.0), rollout(3, None)), group(rollout(4, 1.0), domain="qa")]
    )
    assert metrics["reward_by_domain"] == {"agent": 0.5, "qa": 1.0} and metrics["reward_mean"] == pytest.approx(2 / 3)
    assert metrics["equal_groups"] == metrics["dropped_groups"] == 1
    assert "reward_mean" not in metrics_of([group(rollout(1, None), rollout(2, None))])


def test_the_mix_of_a_batch_is_its_groups_and_trained_tokens_by_domain() -> None:
    alike = group(rollout(6, 1.0), rollout(7, 1.0), domain="reasoning")  # equal rewards: nothing of it is trained
    pair = group(rollout(4, 1.0, turns=1), rollout(5, 0.0, turns=2), domain="qa")
    metrics = metrics_of([pair, group(rollout(1, 1.0), rollout(2, 0.0), rollout(3, None)), alike])
    assert metrics["groups_by_domain"] == {"agent": 1, "qa": 1, "reasoning": 1}
    assert metrics["tokens_by_domain"] == {"agent": 10, "qa": 5, "reasoning": 0}
    assert sum(metrics["tokens_by_domain"].values()) == metrics["trained_tokens"]


def test_each_agent_of_a_batch_has_its_share_and_its_rewards_and_lengths() -> None:
    alike = replace(group(rollout(6, 1.0), rollout(7, 1.0)), agent="native")  # nothing of it is trained
    first = replace(group(rollout(1, 1.0), rollout(2, 0.0), rollout(3, None)), agent="aider")
    second = replace(group(rollout(4, 1.0, turns=1), rollout(5, 0.0, turns=2)), agent="aider")
    metrics = metrics_of([alike, first, second])
    assert metrics["reward_by_agent"] == {"aider": 0.5, "native": 1.0}
    assert metrics["groups_by_agent"] == {"aider": 2, "native": 1}
    assert metrics["tokens_by_agent"] == {"aider": 15, "native": 0} and metrics["share_by_agent"]["aider"] == 1.0
    assert metrics["turns_by_agent"] == {"aider": 12 / 5, "native": 3}
    assert metrics["length_by_agent"] == {"aider": 4, "native": 5}
    assert dict(scalars(metrics))["reward_by_agent/native"] == 1.0
    assert "groups_by_agent" not in metrics_of([group(rollout(1, 1.0), rollout(2, 0.0))])  # a row of an older run


def test_what_rollouts_did_is_told_with_its_drift_from_the_first_step() -> None:
    def calling(number: int, name: str) -> LeasedRollout:
        call = {"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}
        reply = {"role": "assistant", "content": None, "tool_calls": [call]}
        items = [
            replace(item, reply=reply, observed=Observed(faults=("lacks a field",) if item.ordinal else ()))
            for item in rollout(number, float(number % 2), turns=2).completions
        ]
        return replace(rollout(number, float(number % 2)), completions=items)

    groups = [group(calling(1, "read"), calling(2, "grep")), group(calling(3, "read"), calling(4, "read"), domain="qa")]
    metrics = metrics_of(groups, first_commands={"read": 3, "grep": 1})
    assert metrics["behaviour"]["calls"] == 2 and metrics["behaviour"]["failure_rate"] == 1
    assert metrics["behaviour"]["command_drift"] == 0 and metrics["events"]["malformed_call"] == 1
    assert metrics["failure_rate_by_domain"] == {"agent": 1, "qa": 1} and metrics["command_counts"] == {
        "read": 6,
        "grep": 2,
    }
    tags = dict(scalars(metrics))
    assert tags["behaviour/calls"] == 2 and tags["tool_failure_rate/read"] == 1
    assert not any("command_counts" in tag for tag in tags)
    assert "command_drift" not in metrics_of(groups)["behaviour"]


def test_lengths_are_those_of_rollouts_above_and_below_their_groups_mean() -> None:
    groups = [group(rollout(1, 1.0, turns=1), rollout(2, 0.0, turns=3), rollout(3, 0.0, turns=2), rollout(4, None))]
    by_side = lengths([*groups, group(rollout(5, 1.0), rollout(6, 1.0))], ("main",))
    assert (by_side["positive_length_mean"], by_side["negative_length_mean"]) == (2, 4)
    assert by_side["negative_length_p99"] == pytest.approx(4.98)
    nobody = {"positive_rollouts": 0, "negative_rollouts": 0, "truncated_share": 0.0}
    assert lengths([group(rollout(5, 1.0), rollout(6, 1.0))], ("main",)) == nobody


def test_staleness_is_counted_by_token_and_by_group() -> None:
    members = rollout(1, 1.0, version="v1"), rollout(2, 0.0, version="v2")
    metrics = metrics_of([group(*members, staleness=1)])
    assert metrics["staleness_tokens"] == {"0": 5, "1": 5} and metrics["staleness_tokens_mean"] == 0.5
    assert metrics["staleness_groups"] == {"1": 1}


def test_a_completion_that_an_update_crossed_has_the_lag_of_each_token() -> None:
    first, *rest = rollout(1, 1.0, version="v2").completions
    first = replace(first, versions=(VersionSpan("v0", 0, 1), VersionSpan("gone", 1, 2)))
    rows = assemble([group(replace(rollout(1, 1.0), completions=[first, *rest]), rollout(2, 0.0))], StepOptions()).rows
    row = next(row for row in rows if row.completions == (11, 12, 13))
    known = {item.id: item for item in (first, *rest)}
    assert lags(row, known, {"v0": 0, "v2": 2}, 2).tolist() == [2, -1, 0, 0, 0]


def test_mismatch_is_that_of_the_trained_tokens_and_of_fresh_ones() -> None:
    members = rollout(1, 1.0, version="v1"), rollout(2, 0.0, version="v2")
    facts = facts_of([group(*members)])
    rows = {row.completions[0]: row for row in facts.batch.rows}
    stale = {id(rows[11]): TokenNotes(rows[11].rollout_logp[rows[11].places] + 1, rows[11].advantage[rows[11].places])}
    metrics = describe(
        replace(facts, notes={**facts.notes, **stale}), MetricsContext(shape=SHAPE, versions={"v1": 1, "v2": 2})
    )
    assert metrics["extreme_tokens"] == 0.5 and metrics["logprob_gap_mean"] == pytest.approx(0.55)
    assert metrics["kl_fresh"] == pytest.approx(math.exp(0.1) - 1.1, rel=1e-5)


def test_advantages_are_those_the_loss_has() -> None:
    metrics = metrics_of([group(rollout(1, 1.0), rollout(2, 0.0))])
    assert metrics["advantage_max"] == pytest.approx(0.5**0.5, rel=1e-5) == -metrics["advantage_min"]
    assert metrics["advantage_mean"] == pytest.approx(0) and metrics["advantage_std"] == pytest.approx(0.7071, rel=1e-3)


def test_survival_is_told_by_the_length_of_rollouts() -> None:
    short = [group(rollout(2 * n, 1.0, turns=1), rollout(2 * n + 1, 0.0, turns=1)) for n in range(1, 5)]
    long = group(rollout(10, 1.0), rollout(11, None), rollout(12, 0.0))
    # eleven rollouts: the three long ones are the three last deciles
    assert metrics_of([*short, long])["survival_by_length"] == dict.fromkeys(map(str, range(1, 11)), 1.0) | {"9": 0.0}
    assert "survival_by_length" not in metrics_of([long])


def row_of(ids: list[int], trained: Sequence[int]) -> TrainingRow:
    mask = np.isin(np.arange(len(ids)), trained)
    zeros = np.zeros(len(ids), dtype=np.float32)
    return TrainingRow(np.array(ids), mask, zeros, zeros, zeros.astype(np.int64))


def test_work_counts_distinct_tokens_their_keys_and_the_logprobs_asked_for() -> None:
    rows = [row_of([1, 2, 3, 4], [2, 3]), row_of([1, 2, 3, 5], [2, 3]), row_of([1, 2, 3, 4], [3])]
    # inputs 1 2 3: a chain of three; asked for are 3 after 2, and 4 and 5 after 3
    assert merged(rows) == Workload(3, 6, 3) and merged([]) == Workload()
    assert separate([3, 3, 3], 5) == Workload(9, 18, 5)


def test_flops_are_six_per_weight_and_token_and_those_of_attention_and_head() -> None:
    layer = 8 * (2 * 8 + 2 * 4 + 3 * 16)
    assert flops(SHAPE, Workload(tokens=10)) == 6 * 2 * layer * 10
    assert flops(SHAPE, Workload(keys=7)) == 12 * 2 * 8 * 7
    sparse = replace(SHAPE, experts=ExpertShape(8, 2, 4, True, (True, True)))
    assert flops(sparse, Workload(tokens=10)) == 6 * 2 * 8 * (2 * 8 + 2 * 4 + 3 * 2 * 4) * 10
    assert flops(SHAPE, Workload(logprobs=5)) == 6 * 8 * 32 * 5


def test_speed_up_and_mfu_follow_from_the_work() -> None:
    groups = [group(rollout(1, 1.0), rollout(2, 0.0))]
    metrics = metrics_of(groups, peak=1e6)
    # both members are the same history: 10 inputs once as a tree, twice as sequences, and 4 + 6 + 10 by completion
    assert (metrics["computed_tokens"], metrics["flat_tokens"], metrics["call_tokens"]) == (10, 20, 40)
    assert metrics["speedup_tokens"] == 2 and metrics["speedup_flops"] == 2
    assert metrics["mfu"] == metrics["flops"] / 2.0 / 1e6 and metrics["tokens_per_second"] == 5
    assert metrics["speedup_calls_flops"] == flops(SHAPE, Workload(40, 2 * (10 + 21 + 55), 10)) / metrics["flops"]


def test_there_is_no_mfu_where_the_peak_is_not_known() -> None:
    assert "mfu" not in metrics_of([group(rollout(1, 1.0), rollout(2, 0.0))])
    assert peak("cpu", "bfloat16") is None and peak("NVIDIA H200", "float32") is None
    assert peak("NVIDIA H200", "bfloat16") == 989.4e12


def test_a_step_without_anything_to_learn_still_says_what_it_was() -> None:
    metrics = metrics_of([group(rollout(1, 1.0), rollout(2, 1.0))])
    assert metrics["computed_tokens"] == 0 and metrics["trained_tokens"] == 0 and metrics["dropped_groups"] == 1
    assert not {"advantage_mean", "extreme_tokens", "positive_length_mean", "speedup_tokens"} & metrics.keys()


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(UserError, match=r"silent_alarms\[0\] = 'kl' is unknown; choose from slow_phase"):
        checked({"silent_alarms": ["kl"]}, Report, "report")
    with pytest.raises(UserError, match="negative_gradient_every = -1: expected `int` >= 0"):
        checked({"negative_gradient_every": -1}, Report, "report")


def events(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0})
    return events.Reload()


def test_tensorboard_shows_numbers_and_histograms_and_a_new_process_replaces_them(tmp_path: Path) -> None:
    metrics = {
        "loss": 0.5,
        "seconds": {"train": 2.0},
        "staleness_tokens": {"0": 3, "2": 1, "unknown": 4},
        "x": math.nan,
    }
    for last in (3, 2):  # the second process begins after a rollback to step 2
        board = TensorBoard(tmp_path / "board")
        for step in range(1, last + 1):
            board.write(step, 1000.0 + step, metrics | {"loss": step / last})
        board.close()
    shown = events(tmp_path / "board")
    assert len(list((tmp_path / "board").iterdir())) == 1
    assert [(event.step, event.value, event.wall_time) for event in shown.Scalars("loss/loss")] == [
        (1, 0.5, 1001.0),
        (2, 1.0, 1002.0),
    ]
    assert shown.Scalars("seconds/train")[0].value == 2.0 and "x/x" not in shown.Tags()["scalars"]
    bins = shown.Histograms("staleness/staleness_tokens")[0].histogram_value
    assert list(bins.bucket_limit) == [0.5, 1.5, 2.5] and list(bins.bucket) == [3, 0, 1]


def test_a_board_that_cannot_be_opened_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "board").write_text("")
    with pytest.raises(UserError, match="board cannot be written .*make room or choose another output"):
        TensorBoard(tmp_path / "board")


def test_the_coefficient_of_a_token_is_its_pull_in_the_loss() -> None:
    rng = torch.Generator().manual_seed(0)
    logp = (-torch.rand(9, generator=rng)).requires_grad_()
    tokens_ = LossTokens(
        rollout_logp=-3 * torch.rand(9, generator=rng),
        advantage=torch.randn(9, generator=rng),
        mask=torch.ones(9),
        scale=torch.full((9,), 0.5),
    )
    loss_function = partial(policy_loss, rule=rule_of("cispo", 0.0, 2.0))
    loss, _ = loss_function(logp, tokens_)
    loss.backward()
    seen, coefficient = token_arrays(LossInput(logp.detach(), tokens_), loss_function)
    weight = (logp - tokens_.rollout_logp).exp().clamp(max=2.0).detach()
    assert np.allclose(coefficient, (0.5 * weight * tokens_.advantage).numpy(), rtol=1e-6)
    assert (
        logp.grad is not None
        and np.array_equal(-logp.grad.numpy(), coefficient)
        and np.array_equal(seen, logp.detach())
    )


def test_the_record_of_a_steps_tokens_is_what_the_update_gave_them(ranks: Ranks, tmp_path: Path) -> None:
    policy = Policy(write_model(tmp_path / "model"), make_config(tmp_path), ranks)
    rows = [replace(row, completions=(number, number + 50)) for number, row in enumerate(make_rows(7))]
    micros = plan(rows, 1, 80)
    assert len(micros[0]) > 2
    loss = partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))
    update = policy.update(micros[0], 35, loss, 1e-3)
    notes = token_notes(update.loss_inputs, loss, micros, ranks, policy.shard)
    assert sum(float((notes[id(row)].coefficient * notes[id(row)].logp).sum()) for row in rows) / 35 == pytest.approx(
        -update.loss, rel=1e-4
    )
    for row in rows:
        ratio = np.exp(notes[id(row)].logp - row.rollout_logp[row.places]).clip(max=5)
        assert np.allclose(notes[id(row)].coefficient, ratio * row.advantage[row.places], rtol=1e-4)
    tokens.write(target := tokens.path(tmp_path, 4), rows, notes)
    stored = tokens.read(target)
    assert [item.completions for item in stored] == [row.completions for row in rows]
    for item, row in zip(stored, rows, strict=True):
        assert np.array_equal(item.places, row.places) and np.array_equal(item.advantage, row.advantage[row.places])
        assert item.logp is not None and np.array_equal(item.logp, notes[id(row)].logp)
        assert np.array_equal(item.coefficient, notes[id(row)].coefficient)


def test_the_negatives_share_is_measured_and_the_update_stays_the_same(ranks: Ranks, tmp_path: Path) -> None:
    rule, config = rule_of("cispo", 0.0, 5.0), make_config(tmp_path)
    loss, model = partial(policy_loss, rule=rule), write_model(tmp_path / "model")
    ups = [replace(row, advantage=abs(row.advantage)) for row in make_rows(3)]
    downs = [replace(row, advantage=-abs(row.advantage)) for row in make_rows(3, seed=1)]
    micros = [[ups[0], *downs], [], ups[1:]]
    measured, untouched = Policy(model, config, ranks), Policy(model, config, ranks)
    shares = gradient_shares(measured, micros, 30, rule)
    one, other = (policy.update(micros, 30, loss, 1e-2) for policy in (measured, untouched))
    assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    for policy, name in ((measured, "measured"), (untouched, "untouched")):
        policy.write_hf(tmp_path / name)
    assert same_files(tmp_path / "measured", tmp_path / "untouched")
    alone = [Policy(model, config, ranks).update([rows], 30, loss, 1e-2).grad_norm for rows in (ups, downs)]
    up, down = shares["positive_gradient_norm"], shares["negative_gradient_norm"]
    assert [up, down] == pytest.approx(alone, rel=1e-4) and up != pytest.approx(down, rel=1e-2)
    assert shares["negative_gradient_share"] == down / (up + down)
    assert gradient_shares(untouched, [[]], 0, rule) == {}


def documented() -> dict[str, bool]:
    """The names in the table of metrics on docs/training.md -> whether it stands in the first column.

    `_end` goes on from the name before it; `name_*` is the beginning of several.
    """
    page = (Path(__file__).parents[2] / "docs/training.md").read_text().split("## Metrics")[1].split("## Alarms")[0]
    names: dict[str, bool] = {}
    for row in re.findall(r"^\| `.+", page, re.MULTILINE):
        first, last = row.split(" | ")[0], ""
        for name in re.findall(r"`(\w+\*?)`", row):
            last = last if name.startswith("_") else name
            whole = last.rpartition("_")[0] + name if name.startswith("_") else name
            names[whole] = names.get(whole, False) or f"`{name}`" in first
    return names


def test_every_metric_is_on_the_page_and_what_is_on_the_page_is_a_metric() -> None:
    metrics = many_metrics()
    of_the_loop = {"alarms", "pause_seconds", "engine_wait_seconds", "negative_gradient_share", "unused_groups"}
    of_the_loop |= {"monitor", "monitor_states", "monitor_tasks", "abort_share", "return_deviation"}
    of_the_loop |= {"left_out_rollouts", "left_out_tokens", "left_out_so_far", "imitated_tokens", "imitation_loss"}
    named = documented()

    def on_the_page(metric: str) -> bool:
        return metric in named or any(name.endswith("*") and metric.startswith(name[:-1]) for name in named)

    assert {metric for metric in metrics if not on_the_page(metric)} == set()
    assert {name for name in flat(metrics, 4) if not known(name)} == set()  # rules may read every number
    promised = {name for name, first in named.items() if first and not name.endswith("*")}
    assert promised - metrics.keys() == of_the_loop


def many_metrics(sums: LossSums | None = None, **changes: Any) -> dict[str, Any]:
    """The metrics of a step of five groups and two updates. `changes`: of the update."""
    many = facts_of([replace(group(rollout(2 * n, 1.0), rollout(2 * n + 1, 0.0)), agent="native") for n in range(1, 6)])
    zero = torch.zeros(2)
    _, none = policy_loss(zero, LossTokens(rollout_logp=zero, advantage=zero, mask=zero), rule_of("cispo", 0.0, 5.0))
    update = replace(many.update, sums=sums or none, **changes)
    facts = replace(many, update=replace(update, later=[update, update]))
    return describe(facts, MetricsContext(shape=SHAPE, peak=1e6, versions={"v1": 2}))


def test_every_figure_that_a_rule_may_read_is_one_that_something_computes() -> None:
    """A rule over a name that no step has would never fire."""
    imitating = LossSums(torch.ones(12), torch.ones(()))
    routing = dict.fromkeys(("routing_replayed", "routing_mismatch", "routing_mismatches"), 0.5)  # megatron/replay.py
    metrics = many_metrics(imitating, drafts=DraftMetrics(1.0, 1.0, (0.5,)), routing=routing)
    metrics |= dict.fromkeys(("negative_gradient_share", "positive_gradient_norm", "negative_gradient_norm"), 0.5)
    metrics["abort_share"] = 0.0  # by the reporter
    of_the_monitor = {"slow_phase"}
    assert SCALARS - flat(metrics, 4).keys() == of_the_monitor
    of_the_reporter = {"unused_groups", "left_out_rollouts", "left_out_tokens", "return_deviation"}
    assert FAMILIES - metrics.keys() == of_the_reporter
    done = of_rollout(worked(), 1.0, True).means().keys() - {"reward"}
    assert {*done, "command_drift"} == BEHAVIOUR
    member = replace(rollout(1, 1.0), completions=worked(), hacked=True)
    mine = own_figures([group(member, rollout(2, 0.0))], ("main",))[1]
    assert mine["behaviour/hacked"] == 1.0 and mine.keys() >= OWN
    assert {name for name in mine if not known(name) or not own(name)} == set()
