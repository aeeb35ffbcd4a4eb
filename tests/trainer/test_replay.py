"""Routing replay: routers use exactly the recorded experts, by trees as by separate rows."""

import random
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import pytest
import torch
from sqlalchemy import select, update

from proxy.pool.completions.records import Completion, int_bytes
from proxy.pool.completions.routed_experts import RoutedExperts as Stored
from proxy.pool.completions.routed_experts import pack as pack_experts
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts import runs
from proxy.pool.schema import completions
from proxy.pool.training import steps
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout
from tests.trainer import replay_ranks
from tests.trainer.make import VOCABULARY, cpu_only, fill, make_config, write_model
from tests.trainer.reference import Reference
from tests.trainer.replay_ranks import MIXTURE, REPLAY, drawn, routed
from tests.trainer.test_tree import distance, gradients, rows_of
from tests.trainer.torchrun import run_torch
from trainer.commands.main import main
from trainer.config.model_shape import ExpertShape
from trainer.config.step import StepOptions
from trainer.data.assemble import assemble, merge, why_not_trainable
from trainer.data.packing import pack, plan
from trainer.data.routed_experts import UNKNOWN, RecordedExperts
from trainer.data.row import TrainingRow
from trainer.data.tree import build
from trainer.loop import train
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import policy_loss
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy


def stored(choices: np.ndarray, start: int = 0) -> Stored:
    """Experts as an engine records them: in any order."""
    _, layers, top_k = choices.shape
    return Stored(start, layers, top_k, 1, choices[..., ::-1].astype(np.uint8).tobytes())


def completion(
    id: int, prefix_of: int | None, length: int, prompt: Sequence[int], sampled: Sequence[int]
) -> Completion:
    """`prompt`: all of it; `length`: how much of it stands in `prefix_of`."""
    return Completion(
        id=id,
        ordinal=id - 1,
        attempt_id=1,
        prefix_of=prefix_of,
        prefix_length=length,
        prompt_tail=array("i", prompt[length:]),
        sampled=array("i", sampled),
        logprobs=array("f", [-1.0] * len(sampled)),
        versions=(),
        finish_reason="stop",
        reply={},
        path_crc=crc32(int_bytes([*prompt, *sampled])),
        started_at=0,
        finished_at=1,
    )


# ---- along a path


def test_a_path_has_the_choices_of_the_rows_that_it_goes_through() -> None:
    choices = drawn(np.random.default_rng(0), 9)
    one = replace(completion(1, None, 0, [1, 2, 3], [4, 5]), experts=stored(choices[:4]))
    two = replace(completion(2, 1, 5, [1, 2, 3, 4, 5, 6], [7, 8]), experts=stored(choices[4:7], 4))
    cut = replace(completion(3, 2, 2, [1, 2, 9], [4]), experts=stored(choices[7:8], 2))
    recorded = RecordedExperts([one, two, cut], MIXTURE)
    assert (recorded.along(1)[:4] == choices[:4]).all() and (recorded.along(1)[4:] == UNKNOWN).all()
    assert (recorded.along(2)[:7] == choices[:7]).all() and (recorded.along(2)[7:] == UNKNOWN).all()
    assert (recorded.along(3) == np.concatenate((choices[:2], choices[7:8], np.full((1, 2, 3), UNKNOWN)))).all()


def test_what_is_missing_stays_missing() -> None:
    choices = drawn(np.random.default_rng(0), 7)
    one = completion(1, None, 0, [1, 2, 3], [4, 5])  # the engine named none
    late = replace(completion(2, 1, 5, [1, 2, 3, 4, 5, 6], [7, 8]), experts=stored(choices[5:], 5))
    twice = choices.copy()
    twice[3, 1] = [0, 0, 0]  # what a cache holds that was never filled
    whole = replace(late, experts=stored(twice))
    assert (RecordedExperts([one, late], MIXTURE).along(2)[:5] == UNKNOWN).all()
    experts = RecordedExperts([one, whole], MIXTURE).along(2)
    assert (
        (experts[3, 1] == UNKNOWN).all()
        and (experts[3, 0] == choices[3, 0]).all()
        and (experts[4:7] == choices[4:]).all()
    )


@pytest.mark.parametrize(
    "other", [replace(MIXTURE, count=7), replace(MIXTURE, per_token=2), replace(MIXTURE, layers=(True,) * 3)]
)
def test_choices_of_another_model_are_refused(other: ExpertShape) -> None:
    choices = np.broadcast_to(np.array([5, 6, 7], dtype=np.int16), (4, 2, 3))
    one = replace(completion(1, None, 0, [1, 2, 3], [4, 5]), experts=stored(choices))
    with pytest.raises(UserError, match="has experts up to 7 in 2 layers, 3 for a token, and the model has"):
        RecordedExperts([one], other).along(1)


def test_a_sequence_goes_on_only_where_its_experts_do() -> None:
    """The third completion's prompt begins with the path of both siblings, and was computed as the second one's."""
    choices = drawn(np.random.default_rng(0), 8)
    one = replace(completion(1, None, 0, [1, 2, 3], [4, 5]), experts=stored(choices[:4]))
    same = replace(completion(2, 1, 3, [1, 2, 3], [4, 5]), experts=stored(choices[4:5], 3))
    prompt = [1, 2, 3, 4, 5, 6]
    for before in (1, 2):
        third = replace(completion(3, before, 5, prompt, [7, 8]), experts=stored(choices[5:], 4))
        rows = merge([one, same, third], 1.0, Counter(), why_not_trainable, mixture=MIXTURE)
        sizes = [[len(row.tokens), int(row.trained.sum())] for row in rows]
        assert sorted(sizes) == [[5, 2], [8, 4]]
        (long,) = (row for row in rows if len(row.tokens) == 8)
        assert long.experts is not None
        assert (long.experts[3] == (choices[3] if before == 1 else choices[4])).all()
        assert (long.experts[4:7] == choices[5:8]).all()


def test_a_prompt_that_was_computed_again_is_a_sequence_of_its_own() -> None:
    """The engine computed the prompt again from its first token, and chose other experts than before."""
    before, after = (drawn(np.random.default_rng(seed), 7) for seed in (0, 1))
    one = replace(completion(1, None, 0, [1, 2, 3], [4, 5]), experts=stored(before[:4]))
    two = replace(completion(2, 1, 5, [1, 2, 3, 4, 5, 6], [7, 8]), experts=stored(after))
    rows = merge([one, two], 1.0, Counter(), why_not_trainable, mixture=MIXTURE)
    assert [row.tokens[row.trained].tolist() for row in rows] == [[4, 5], [7, 8]]
    for row, kept in zip(rows, (before, after), strict=True):
        assert row.experts is not None and (row.experts[:4] == kept[:4]).all()
    assert [row.tokens.tolist() for row in merge([one, two], 1.0, Counter(), why_not_trainable)] == [list(range(1, 9))]


def test_a_step_without_any_recorded_choice_is_refused() -> None:
    chains = [[completion(1, None, 0, [1, 2], [3])] for _ in range(2)]
    members = [LeasedRollout(index, index, float(index), None, chain) for index, chain in enumerate(chains)]
    with pytest.raises(UserError, match="none of the step's 2 sequences has recorded experts"):
        assemble([LeasedGroup(1, 0, {}, 0, members)], StepOptions(mixture=MIXTURE))


def test_a_dense_model_has_nothing_to_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "model")
    file = tmp_path / "trainer.toml"
    file.write_text('pool = "pool.db"\nrun = "r"\nmodel = "model"\noutput = "out"\n[loss]\nrouting = "replay"\n')
    assert main(["launch", str(file)]) == 2
    assert "needs a mixture of experts, and qwen3 is a dense model; set it to own" in capsys.readouterr().err


# ---- in the trie


@pytest.mark.parametrize("seed", range(20))
def test_equal_tokens_that_went_to_other_experts_are_other_nodes(seed: int) -> None:
    rows = routed(rows_of(seed), seed)
    tree, nodes = build(rows), set()
    for row in rows:
        assert row.experts is not None
        path = [(int(token), choice.tobytes()) for token, choice in zip(row.tokens, row.experts, strict=True)]
        nodes |= {tuple(path[: end + 1]) for end in range(row.inputs)}
    assert len(tree.tokens) == len(nodes) >= len(build(rows_of(seed)).tokens)
    assert tree.experts is not None and len(tree.experts) == len(tree.tokens)
    last = np.concatenate([np.full(run.end - run.start, run.last) for run in tree.runs])
    along = [[j for j in range(i + 1) if i < last[j]] for i in range(len(last))]
    assert {tuple((int(tree.tokens[j]), tree.experts[j].tobytes()) for j in path) for path in along} == nodes


def test_rows_part_where_their_experts_do() -> None:
    choices = drawn(np.random.default_rng(0), 6)
    other = choices.copy()
    other[2, 1] = [0, 1, 2] if other[2, 1].tolist() != [0, 1, 2] else [1, 2, 3]
    rows = [one_row(range(6), experts) for experts in (choices, choices, other)]
    assert len(build(rows).tokens) == 5 + 3 and len(build(rows[:2]).tokens) == 5


# ---- through Megatron's layers


@pytest.fixture
def policy(ranks: Ranks, tmp_path: Path) -> Policy:
    return Policy(write_model(tmp_path / "model", "qwen3_moe"), make_config(tmp_path, **REPLAY), ranks)


def one_row(tokens: Sequence[int], choices: np.ndarray | None) -> TrainingRow:
    every, size = np.arange(len(tokens)) > 0, len(tokens)
    zeros = np.zeros(size, dtype=np.float32)
    return TrainingRow(np.array(tokens), every, zeros, zeros, np.zeros(size, dtype=np.int64), experts=choices)


def computed(policy: Policy, row: TrainingRow) -> torch.Tensor:
    return policy.logprobs(pack([row], policy.shard)[0]).double().cpu()


@pytest.mark.parametrize("kind", ["own", "others", "some unknown"])
def test_logprobs_are_those_of_a_model_that_the_experts_are_forced_on(kind: str, policy: Policy) -> None:
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, 40).tolist()
    reference = Reference(policy.source)
    free, own = reference(tokens)
    choices = np.sort(own.numpy().astype(np.int16), axis=-1)
    if kind != "own":
        choices = drawn(np.random.default_rng(2), len(tokens))
    if kind == "some unknown":
        choices[::3, 0] = UNKNOWN
        choices[5:9] = UNKNOWN
    forced, chosen = reference(tokens, torch.from_numpy(choices).long())
    logits = computed(policy, one_row(tokens, choices))
    expected = forced[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert (logits - expected).abs().max() < 1e-5
    apart = (forced - free).abs().max()
    assert apart < 1e-12 if kind == "own" else apart > 0.5
    known = choices[:-1, :, 0] != UNKNOWN
    otherwise = (np.sort(chosen.numpy(), axis=-1) != choices).any(-1)[:-1] & known
    assert policy.model.replay_counter is not None
    assert policy.model.replay_counter.metrics() == {
        "routing_replayed": pytest.approx(known.mean()),
        "routing_mismatch": pytest.approx(otherwise.sum() / known.sum()),
        "routing_mismatches": otherwise.sum(),
    }
    assert (otherwise.sum() == 0) == (kind == "own")


@cpu_only("it asks for the same bits, and a GPU adds up in any order")
def test_own_choices_give_what_routers_give_that_choose(policy: Policy, ranks: Ranks) -> None:
    tokens = np.random.default_rng(3).integers(0, VOCABULARY, 60).tolist()
    _, own = Reference(policy.source)(tokens)
    choosing = Policy(policy.source, make_config(policy.source.parent), ranks)
    assert torch.equal(
        computed(policy, one_row(tokens, own.numpy().astype(np.int16))), computed(choosing, one_row(tokens, None))
    )
    assert choosing.model.replay_counter is None


@pytest.mark.parametrize("recompute", [False, True])
def test_trees_give_the_loss_and_gradient_of_separate_rows(recompute: bool, ranks: Ranks, tmp_path: Path) -> None:
    config = make_config(tmp_path, parallel={"recompute": recompute}, **REPLAY)
    policy = Policy(write_model(tmp_path / "model", "qwen3_moe"), config, ranks)
    rows = routed([*rows_of(1, vocabulary=VOCABULARY, longest=30), *rows_of(3, vocabulary=2, longest=20)])
    flat = gradients(policy, [[one] for one in rows if one.inputs], "cispo", merge=False)
    assert policy.model.replay_counter is not None
    policy.model.replay_counter.metrics()
    for budget in (50, 10_000):
        (micros,) = plan(rows, 1, budget)
        assert distance(gradients(policy, micros, "cispo", merge=True), flat) <= 1e-5
        size = sum(len(build(micro).tokens) for micro in micros)
        assert size < sum(one.inputs for one in rows)
        metrics = policy.model.replay_counter.metrics()
        kept = sum(
            int((experts[:, 0, 0] >= 0).sum()) for micro in micros if (experts := build(micro).experts) is not None
        )
        assert metrics["routing_replayed"] == pytest.approx(kept / size)  # what is computed again is not counted again
        assert 0 < metrics["routing_mismatches"] <= 2 * kept


def test_routers_learn_by_the_weights_of_the_replayed_experts(policy: Policy) -> None:
    rng = random.Random(0)
    row = routed([one for one in rows_of(7, vocabulary=VOCABULARY, longest=30) if one.inputs][:1], rng.randrange(100))
    grads = gradients(policy, [row], "cispo", merge=True)
    routers = {name: grad for name, grad in grads.items() if "router" in name}
    assert len(routers) == 2 and all(grad.norm() > 0 for grad in routers.values())


@pytest.mark.parametrize("reference", ["initial", "kl_model", "kl_steps_ago"])
def test_the_reference_of_kl_replays_the_same_experts(reference: str, ranks: Ranks, tmp_path: Path) -> None:
    """Its logprobs are those that a policy with its weights has along the same experts."""
    model = write_model(tmp_path / "model", "qwen3_moe")
    other = model if reference == "initial" else write_model(tmp_path / "other", "qwen3_moe", seed=1)
    named: dict[str, Any] = {"initial": {}, "kl_model": {"kl_model": str(other)}, "kl_steps_ago": {"kl_steps_ago": 1}}
    policy = Policy(model, make_config(tmp_path, loss={**REPLAY["loss"], "kl": 0.1, **named[reference]}), ranks)
    if reference == "kl_steps_ago":
        policy.refer_to(other)
    rows = routed([one for one in rows_of(7, vocabulary=VOCABULARY, longest=30) if one.inputs])
    rule = replace(rule_of("cispo", 0.0, 5.0), kl=0.1)
    (micros,) = plan(rows, 1, 10_000)
    tokens = sum(len(one.places) for one in rows)
    update = policy.update(micros, tokens, partial(policy_loss, rule=rule), 1e-2)
    plain = partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))
    alone = Policy(other, make_config(tmp_path, **REPLAY), ranks).update(micros, tokens, plain, 1e-2)
    for inputs, expected in zip(update.loss_inputs, alone.loss_inputs, strict=True):
        assert inputs.tokens.reference_logp is not None
        assert torch.allclose(inputs.tokens.reference_logp, expected.logp, atol=1e-5)
    assert update.routing["routing_replayed"] <= 1


def test_a_step_replays_what_the_pool_holds(pool: Pool, ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3_moe")
    report = {"silent_alarms": ["kl_rollout", "extreme_tokens"]}  # the rollouts' logprobs are made up
    config = make_config(tmp_path, steps=1, report=report, **REPLAY)
    run = runs.open_run(pool, config.run, "train", {})
    fill(pool, run.id, 2, size=2)
    rng = np.random.default_rng(0)
    with pool.write() as connection:
        for row in connection.execute(select(completions.c.id, completions.c.prompt_tail, completions.c.sampled)).all():
            known = (len(row.prompt_tail) + len(row.sampled)) // 4 - 1
            changed = update(completions).where(completions.c.id == row.id)
            connection.execute(changed.values(experts=pack_experts(stored(drawn(rng, known)))))
    train(config, ranks)
    learned = steps.metrics(pool, run.id)[-1]
    assert learned["routing_replayed"] == 1 and learned["routing_mismatches"] > 0
    assert learned["routing_mismatch"] == learned["routing_mismatches"] / (2 * learned["computed_tokens"])


@pytest.mark.long
def test_two_ranks_replay_what_one_replays(ranks: Ranks, tmp_path: Path) -> None:
    """For every split of tokens, layers and experts; every choice is counted once."""
    model = write_model(tmp_path / "model", "qwen3_moe")
    expected = {parts: replay_ranks.learn(model, {}, ranks, parts) for parts in (1, 2)}
    run_torch("tests.trainer.replay_ranks", str(model), str(tmp_path))
    for name, chosen in replay_ranks.SPLITS.items():
        split = msgspec.json.decode((tmp_path / name).read_bytes())
        alone = expected[1 if {"tensor", "context", "pipeline"} & chosen.keys() else 2]
        assert alone["routing_mismatches"] > 0 and split == pytest.approx(alone, rel=1e-5), name
