"""The MTP head in training: exact by trees, invisible to the policy, the same outside as the engine's draft model."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from proxy.engine.sglang import CPU_PATH
from proxy.pool.errors import UserError
from proxy.pool.training.steps import Version
from tests.conftest import need
from tests.trainer.make import HEADS_OF, HIDDEN, VOCABULARY, cpu_only, make_config, write_model
from tests.trainer.test_report import SHAPE, facts_of, group, rollout
from tests.trainer.test_tree import rows_of
from tests.trainer.test_weights import same_files
from trainer.config import Mtp
from trainer.data.packing import ContextShard, pack, plan
from trainer.data.row import TrainingRow
from trainer.data.tree import TokenRun
from trainer.drafter import Drafter, drafted_at
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import policy_loss
from trainer.megatron.mtp.head import head_input
from trainer.megatron.mtp.loss import DraftMetrics
from trainer.megatron.mtp.weights import HEAD_TENSORS
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy, Update
from trainer.report.describe import MetricsContext, describe, line

LOSS = partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))
ROWS = [one for seed in (5, 6) for one in rows_of(seed, vocabulary=3, longest=25) if one.inputs]


def policy_of(
    directory: Path, ranks: Ranks, options: Mapping[str, Any] | None = None, kind: type[Mtp] = Mtp, **mtp: Any
) -> Policy:
    """Of the model there; a MiMo where there is none."""
    model = directory / "model"
    if not model.exists():
        write_model(model, "mimo")
    return Policy(model, make_config(directory, mtp=kind(**{"drafts": 2, **mtp}), **(options or {})), ranks)


def drafter_of(policy: Policy) -> Drafter:
    assert policy.drafter is not None
    return policy.drafter


def update(policy: Policy, budget: int = 10_000, rate: float = 1e-2) -> Update:
    (micros,) = plan(ROWS, 1, budget)
    return policy.update(micros, sum(len(one.places) for one in ROWS), LOSS, rate)


def drafts_of(done: Update) -> DraftMetrics:
    assert done.drafts is not None
    return done.drafts


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.named_parameters()}


def equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@cpu_only("FlexAttention knows no double precision")
@pytest.mark.parametrize("family", ["mimo", pytest.param("qwen3_moe_head", marks=pytest.mark.long)])
def test_trees_give_the_heads_the_loss_and_gradient_of_separate_rows(family: str, ranks: Ranks, tmp_path: Path) -> None:
    """Through the same Megatron layers, in double precision, every parameter's gradient to 1e-9."""
    write_model(tmp_path / "model", family, seed=1)  # with which every expert has a token

    class NarrowMtp(Mtp, frozen=True, kw_only=True):
        LIKELIEST = 4

    policy = policy_of(tmp_path, ranks, kind=NarrowMtp, drafts=3)
    policy.model.double()
    drafter = drafter_of(policy)
    parameters = dict(drafter.head.double().named_parameters())

    def gradient(micros: list[list[TrainingRow]], merge: bool) -> dict[str, Tensor]:
        drafter.begin(micros)
        losses = []
        for rows in micros:
            packed, _ = pack(rows, ContextShard(ranks.device), merge)
            policy.model.logits(packed)  # Megatron's cross entropy works in single precision
            assert drafter.hidden is not None
            losses.append(drafter.loss(rows, packed, drafter.hidden))
        total = torch.stack(losses).sum()
        grads = torch.autograd.grad(total, list(parameters.values()))
        return dict(zip(parameters, grads, strict=True)) | {"loss": total.detach(), "sums": drafter.sums}

    flat = gradient([[one] for one in ROWS], merge=False)
    assert flat["loss"].dtype == torch.float64 and all(value.norm() > 0 for value in flat.values())
    for budget in (30, 10_000):
        micros = plan(ROWS, 1, budget)[0]
        merged = gradient(micros, merge=True)
        assert max((merged[name] - flat[name]).norm() / flat[name].norm() for name in flat) <= 1e-9
    assert len(micros) == 1


def test_a_place_that_branches_share_counts_once_for_each(ranks: Ranks, tmp_path: Path) -> None:
    packed, _ = pack(ROWS, ContextShard(ranks.device))
    places, branches = drafted_at(ROWS, packed, 1)
    flat = [pack([one], ContextShard(ranks.device)) for one in ROWS]
    apart = [drafted_at([one], alone, 1)[1].sum() for one, (alone, _) in zip(ROWS, flat, strict=True)]
    assert branches.sum() == sum(apart) and len(places) < branches.sum() and len(places) == len(set(places.tolist()))


@cpu_only("it asks for the same bits, and a GPU adds up in any order")
def test_the_policy_learns_what_it_learns_without_a_head(ranks: Ranks, tmp_path: Path) -> None:
    plain, drafting = policy_of(tmp_path, ranks, drafts=0), policy_of(tmp_path, ranks)
    for _ in range(3):
        without, beside = update(plain), update(drafting)
        assert (without.loss, without.grad_norm) == (beside.loss, beside.grad_norm) and without.drafts is None
    assert equal(weights(plain.model), weights(drafting.model))


def test_gradients_reach_the_head_alone_and_all_of_it(ranks: Ranks, tmp_path: Path) -> None:
    policy = policy_of(tmp_path, ranks)
    drafter = drafter_of(policy)
    policy.ddp.zero_grad_buffer()
    packed, _ = pack(ROWS, policy.shard)
    policy.logprobs(packed)
    drafter.begin([ROWS])
    drafter.learn(ROWS, packed)
    assert all(param.grad is None and not param.main_grad.any() for param in policy.model.parameters())
    assert all(param.main_grad.norm() > 0 for param in drafter.head.parameters())


def test_a_head_follows_and_a_frozen_one_stays_as_it_is(ranks: Ranks, tmp_path: Path) -> None:
    still = {"optimizer": {"lr": 1e-9}}  # of the policy
    trained, frozen = policy_of(tmp_path, ranks, still, lr=1e-2), policy_of(tmp_path, ranks, still, lr=0)
    before = weights(drafter_of(frozen).head)
    reached = [drafts_of(update(trained, rate=1e-9)) for _ in range(25)]
    stayed = drafts_of(update(frozen, rate=1e-9))
    assert (stayed.loss, stayed.accepted, stayed.grad_norm) == (reached[0].loss, reached[0].accepted, 0.0)
    assert reached[-1].loss < 0.3 * reached[0].loss and min(reached[-1].accepted) > max(reached[0].accepted)
    assert equal(before, weights(drafter_of(frozen).head)) and not equal(before, weights(drafter_of(trained).head))


def test_a_head_may_learn_slower_than_the_policy_at_its_lowest_rate(ranks: Ranks, tmp_path: Path) -> None:
    falls = {"optimizer": {"lr": 1e-2, "min_lr": 1e-3, "decay": "cosine"}}
    drafter = drafter_of(policy_of(tmp_path, ranks, falls, lr=1e-5))
    assert drafter.trained and drafter.lr_ratio == pytest.approx(1e-3)


def test_logits_in_parts_give_the_heads_the_same_update(ranks: Ranks, tmp_path: Path) -> None:
    policies = [policy_of(tmp_path, ranks), policy_of(tmp_path, ranks)]
    policies[1].model.logits_tokens = 5
    first, second = (drafts_of(update(policy)) for policy in policies)
    assert second.loss == pytest.approx(first.loss, rel=1e-6)
    assert second.grad_norm == pytest.approx(first.grad_norm, rel=1e-5)


@pytest.mark.parametrize("family", ["mimo", "qwen3_moe_head"])
def test_a_head_comes_back_bit_exact(family: str, ranks: Ranks, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", family)
    for number, mtp in enumerate([{"drafts": 2}, {"drafts": 0}]):  # known, or kept as it is
        Policy(source, make_config(tmp_path, mtp=mtp), ranks).write_hf(tmp_path / f"out{number}")
        assert same_files(source, tmp_path / f"out{number}")


@pytest.mark.parametrize("family", ["mimo", "qwen3_moe_head"])
def test_a_directory_without_a_head_gets_one_from_its_last_layer(family: str, ranks: Ranks, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", family)
    tensors = load_file(source / "model.safetensors")
    rest = {name: value for name, value in tensors.items() if not name.startswith(HEAD_TENSORS)}
    save_file(rest, source / "model.safetensors")
    policy_of(tmp_path, ranks).write_hf(tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    block, (*norms, projection) = HEADS_OF[family.removesuffix("_head")]
    assert exported.keys() == tensors.keys()
    layer = {name.removeprefix(block): value for name, value in exported.items() if name.startswith(f"{block}.")}
    copied = [name for name in layer if f"model.layers.1{name}" in rest]
    assert len(copied) > 10 and all(torch.equal(layer[name], rest[f"model.layers.1{name}"]) for name in copied)
    assert torch.equal(exported[projection], torch.eye(HIDDEN).repeat(1, 2))
    again = Policy(tmp_path / "out", make_config(tmp_path, mtp={"drafts": 2}), ranks)
    assert equal(weights(drafter_of(again).head), weights(drafter_of(policy_of(tmp_path, ranks)).head))


def test_a_family_without_a_draft_model_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    write_model(tmp_path / "model", "qwen3")
    with pytest.raises(UserError, match="is of family qwen3, for which SGLang has no draft model; set mtp.drafts = 0"):
        policy_of(tmp_path, ranks)


REFERENCE = """
import json, sys, torch
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
directory = sys.argv[1]
values = json.load(open(directory + "/config.json"))
config = Qwen2Config(**{**values, "model_type": "qwen2"}, attn_implementation="eager")
tensors = load_file(directory + "/model.safetensors")
model = Qwen2ForCausalLM(config)
model.load_state_dict({name: value for name, value in tensors.items() if "mtp" not in name})
head = {name.removeprefix("model.mtp_layers.0."): value for name, value in tensors.items() if "mtp" in name}
own = ("token_layernorm.weight", "hidden_layernorm.weight", "input_proj.weight", "final_layernorm.weight")
layer = Qwen2DecoderLayer(config, 0)
layer.load_state_dict({name: value for name, value in head.items() if name not in own})

def norm(name, hidden):
    module = Qwen2RMSNorm(config.hidden_size, config.rms_norm_eps)
    module.weight.data = head[name + ".weight"]
    return module(hidden)

def draft(ids):
    # the tokens from the second one on, each at the position of the hidden state before it
    hidden, embedded = model.model(ids[None]).last_hidden_state[:, :-1], model.model.embed_tokens(ids[None, 1:])
    embedded[:, 0] = 0
    size = hidden.shape[1]
    mixed = torch.cat((norm("hidden_layernorm", hidden), norm("token_layernorm", embedded)), -1)
    mixed = mixed @ head["input_proj.weight"].T
    positions = torch.arange(size)[None]
    mask = torch.full((size, size), float("-inf")).triu(1)[None, None]
    out = layer(mixed, attention_mask=mask, position_ids=positions,
                position_embeddings=model.model.rotary_emb(mixed, positions))
    out = out[0] if isinstance(out, tuple) else out
    return model.lm_head(norm("final_layernorm", out))[0]

with torch.no_grad():
    torch.save([draft(ids) for ids in torch.load(directory + "/ids.pt")], directory + "/drafts.pt")
"""


@pytest.mark.long
def test_the_exported_head_drafts_what_mimos_draws_from_the_same_tensors(ranks: Ranks, tmp_path: Path) -> None:
    """Against transformers' layers, put together as SGLang's MiMoMTP is; each row by itself, ours as one tree."""
    need("transformers", importlib.util.find_spec("transformers") is not None)
    policy = policy_of(tmp_path, ranks, drafts=1)
    drafter = drafter_of(policy)
    for _ in range(2):
        update(policy)
    policy.write_hf(tmp_path / "out")
    sequences = [torch.from_numpy(one.tokens[: one.inputs]) for one in ROWS if one.inputs > 1]
    torch.save(sequences, tmp_path / "out" / "ids.pt")
    environment = {**os.environ, "PYTHONPATH": str(CPU_PATH), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", REFERENCE, str(tmp_path / "out")], check=True, env=environment)
    expected = torch.load(tmp_path / "out" / "drafts.pt")
    packed, _ = pack(ROWS, policy.shard)
    policy.logprobs(packed)
    assert drafter.hidden is not None
    with torch.no_grad():
        context = head_input(policy.model, packed, drafter.hidden, 1, True)
        drafted = policy.model.frozen_logits(drafter.head(context)[0])[:, 0]
    at = {path: place for place, path in enumerate(nodes(packed.tokens.tolist(), packed.runs))}
    for sequence, logits in zip(sequences, expected, strict=True):
        path = tuple(sequence.tolist())
        ours = torch.stack([drafted[at[path[: end + 1]]] for end in range(1, len(path))])
        assert logits.shape == (len(path) - 1, VOCABULARY) and logits.abs().max() > 0.5
        assert (ours - logits).abs().max() < 1e-4


def nodes(tokens: list[int], runs: tuple[TokenRun, ...]) -> Iterator[tuple[int, ...]]:
    """What each place of the layout is, as the tokens up to it."""
    last = [run.last for run in runs for _ in range(run.start, run.end)]
    for i in range(len(tokens)):
        yield tuple(tokens[j] for j in range(i + 1) if i < last[j])


@cpu_only("it asks for the same bits, and a GPU adds up in any order")
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_checkpoint_holds_the_head(precision: str, ranks: Ranks, tmp_path: Path) -> None:
    options = {"parallel": {"precision": precision}}
    undisturbed = policy_of(tmp_path, ranks, options)
    update(undisturbed)
    undisturbed.checkpoints.save(tmp_path / "checkpoint", 1)
    resumed = policy_of(tmp_path, ranks, options)
    assert resumed.checkpoints.load(tmp_path / "checkpoint") == 1
    assert update(resumed).drafts == update(undisturbed).drafts
    for policies in zip(*([policy.model, drafter_of(policy).head] for policy in (resumed, undisturbed)), strict=True):
        assert equal(*(weights(module) for module in policies))
    without = policy_of(tmp_path, ranks, options, drafts=0)
    with pytest.raises(UserError, match="checkpoint was saved with an MTP head, which mtp.drafts = 0 would lose; set"):
        without.checkpoints.load(tmp_path / "checkpoint")
    without.checkpoints.save(tmp_path / "headless", 1)
    with pytest.raises(UserError, match="headless was saved without an MTP head; set mtp.drafts = 0 or"):
        policy_of(tmp_path, ranks, options).checkpoints.load(tmp_path / "headless")


def test_a_steps_metrics_and_its_line_say_how_well_the_head_drafts(ranks: Ranks, tmp_path: Path) -> None:
    done = update(policy_of(tmp_path, ranks))
    facts = replace(facts_of([group(rollout(1, 1.0), rollout(2, 0.0))]), update=done)
    metrics = describe(facts, MetricsContext(shape=SHAPE, versions={"v1": 1}))
    first, second = drafts_of(done).accepted
    assert (metrics["mtp_acceptance_1"], metrics["mtp_acceptance_2"]) == (first, second)
    assert metrics["mtp_length"] == pytest.approx(1 + first + first * second)
    assert f"  draft {metrics['mtp_length']:.2f}  " in line(Version(1, 1, 1, "", "", None, 0.0), metrics)
