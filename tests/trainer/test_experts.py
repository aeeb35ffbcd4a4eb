"""The load-balancing loss of experts: against its definition, and by trees against separate sequences."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from proxy.pool.errors import UserError
from tests.trainer.make import EXPERTS, HIDDEN, VOCABULARY, cpu_only, make_config, write_model
from tests.trainer.test_tree import distance, paths_in, rows_of
from trainer.data.micro_batch import MicroBatch
from trainer.data.packing import ContextShard, pack, plan
from trainer.data.row import TrainingRow
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import policy_loss
from trainer.megatron.model.balance import imbalance
from trainer.megatron.model.grouped import LocalExperts
from trainer.megatron.parallel import Ranks
from trainer.megatron.schedule import forward_backward
from trainer.policy import Minibatch, Policy

CHOSEN = 3


def drawn(seed: int, tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(tokens, EXPERTS, generator=generator, dtype=torch.float64, requires_grad=True)
    return scores, scores.topk(CHOSEN).indices


def by_definition(probabilities: Tensor, chosen: Tensor, rows: list[TrainingRow], packed: MicroBatch) -> Tensor:
    """The definition (DeepSeek-V3, equations 17 to 20), row by row."""
    paths = paths_in(packed.tokens.numpy(), list(packed.runs))
    at = {paths[index]: index for index in reversed(range(len(paths)))}  # padding comes last and counts nothing
    total = []
    for row in rows:
        path = [at[tuple(row.tokens[:length].tolist())] for length in range(1, row.inputs + 1)]
        used = torch.nn.functional.one_hot(chosen[path], EXPERTS).sum((0, 1))
        share = used.double() * EXPERTS / (CHOSEN * row.inputs)
        total.append(len(row.places) * (share * probabilities[path].mean(0)).sum())
    return torch.stack(total).sum()


@pytest.mark.parametrize("seed", range(10))
def test_every_branch_has_the_balance_of_its_own_sequence(seed: int) -> None:
    rows = [one for one in rows_of(seed) if one.inputs]
    packed, _ = pack(rows, ContextShard(torch.device("cpu"), multiple=16, paths=True))
    assert packed.paths is not None
    scores, chosen = drawn(seed, len(packed.tokens))
    expected = by_definition(scores.softmax(-1), chosen, rows, packed)
    loss = imbalance(scores.softmax(-1), chosen, packed.paths)
    gradients = [torch.autograd.grad(value, scores)[0] for value in (loss, expected)]
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-15)


def test_experts_that_are_used_alike_have_a_balance_of_one() -> None:
    rows = [one for one in rows_of(1) if one.inputs]
    packed, _ = pack(rows, ContextShard(torch.device("cpu"), paths=True))
    assert packed.paths is not None
    size = len(packed.tokens)
    alike = torch.full((size, EXPERTS), 1 / EXPERTS, dtype=torch.float64)
    loss = imbalance(alike, torch.arange(EXPERTS).expand(size, EXPERTS), packed.paths)
    assert loss.item() == pytest.approx(sum(len(one.places) for one in rows))


def gradients(policy: Policy, micros: list[list[TrainingRow]], merge: bool) -> dict[str, Tensor]:
    parts = [pack(rows, policy.shard, merge) for rows in micros]

    def loss(number: int, logp: Tensor) -> tuple[Tensor, None]:
        packed, tokens = parts[number]
        return policy_loss(logp[packed.branches], tokens, rule_of("cispo", 0.0, 5.0))[0], None

    policy.ddp.zero_grad_buffer()
    forward_backward(policy.ddp, [packed for packed, _ in parts], loss)
    return {name: param.main_grad.clone() for name, param in policy.model.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
def test_balanced_trees_have_the_gradients_of_separate_sequences(recompute: bool, ranks: Ranks, tmp_path: Path) -> None:
    config = make_config(tmp_path, loss={"balance": 0.1}, parallel={"recompute": recompute})
    policy = Policy(write_model(tmp_path / "model", "qwen3_moe_mixed"), config, ranks)
    rows = [one for seed, size in ((1, 3), (2, VOCABULARY)) for one in rows_of(seed, 9, size, 25) if one.inputs]
    unbalanced = gradients(policy, [[one] for one in rows], merge=False)
    policy.model.balance = 0.1
    flat = gradients(policy, [[one] for one in rows], merge=False)
    router = "decoder.layers.1.mlp.router.weight"
    assert (flat[router] - unbalanced[router]).norm() > 0.01 * flat[router].norm()
    for budget in (35, 10_000):
        (micros,) = plan(rows, 1, budget)
        assert distance(gradients(policy, micros, merge=True), flat) <= 1e-5


def test_only_an_update_adds_the_balance(ranks: Ranks, tmp_path: Path) -> None:
    """Other passes, which measure gradients, are those of their loss; also behind an update, here of no length."""
    model = write_model(tmp_path / "model", "qwen3_moe")
    rows = [one for one in rows_of(2, 9, VOCABULARY, 25) if one.inputs]
    plain, balanced = (Policy(model, make_config(tmp_path, loss={"balance": value}), ranks) for value in (0.0, 10.0))
    loss = partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))
    norms = [one.update([rows], 1, loss, 0.0).grad_norm for one in (plain, balanced)]
    assert abs(norms[1] - norms[0]) > 0.1 * norms[0]
    assert distance(gradients(balanced, [rows], merge=True), gradients(plain, [rows], merge=True)) <= 1e-6


def test_rows_that_are_masked_whole_are_not_balanced(ranks: Ranks, tmp_path: Path) -> None:
    """They have weight 0 in every term of the loss. Here all are masked, so the routers stay as they are, too."""
    policy = Policy(write_model(tmp_path / "model", "qwen3_moe"), make_config(tmp_path, loss={"balance": 10.0}), ranks)
    rows = [replace(one, weight=0.0) for one in rows_of(2, 9, VOCABULARY, 25) if one.inputs]
    loss = partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))
    assert policy.update([rows], 1, loss, 0.0).grad_norm == 0


def test_the_balance_of_a_step_that_imitates_is_divided_alike_by_one_update_and_by_several(
    ranks: Ranks, tmp_path: Path
) -> None:
    """By the imitated tokens too: here nothing is reinforced. The updates are of no length, so all have one norm."""
    config = make_config(tmp_path, loss={"balance": 10.0})
    policy = Policy(write_model(tmp_path / "model", "qwen3_moe"), config, ranks)
    rows = [one for one in rows_of(2, 9, VOCABULARY, 25) if one.inputs]
    loss = partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))
    one, several, undivided = (
        policy.learn([Minibatch([rows], 1, balanced)], orders, loss, 0.0, False).grad_norm
        for balanced, orders in ((24_000, [[0]]), (24_000, [[0], [0]]), (0, [[0]]))
    )
    assert one == pytest.approx(several, rel=1e-6) and abs(undivided - one) > 0.1 * one


def test_a_dense_model_has_nothing_to_balance(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="loss.balance = 0.1 balances experts, but .* has none; set it to 0"):
        Policy(model, make_config(tmp_path, loss={"balance": 0.1}), ranks)


class Stacks(TorchDispatchMode):
    """The memory of all tensors that are stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.stack.default:
            self.made.append(StorageWeakRef(result.untyped_storage()))
        return result


def fuse(model: torch.nn.Module, fused: bool) -> None:
    """Let a model compute SwiGLU as on a GPU, where it is one kernel; on a CPU, the same formula is not compiled."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config.bias_activation_fusion = fused


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param(torch.float32, 1e-5, marks=cpu_only("torch has this product on a GPU in bf16 alone")),
        (torch.bfloat16, 2e-2),
    ],
)
def test_a_grouped_product_is_what_the_experts_give_one_by_one(
    dtype: torch.dtype, tolerance: float, fused: bool, ranks: Ranks, tmp_path: Path
) -> None:
    model = Policy(write_model(tmp_path / "model", "qwen3_moe"), make_config(tmp_path), ranks).model.to(dtype)
    experts = model.decoder.layers[0].mlp.experts
    counts = torch.tensor([5, 0, 3, 1, 0, 7, 2, 6])
    generator = torch.Generator().manual_seed(0)
    hidden, upstream = (torch.randn(24, HIDDEN, generator=generator).to(ranks.device, dtype) for _ in range(2))
    weights = torch.rand(24, generator=generator).to(ranks.device)
    inputs = [hidden.requires_grad_(), weights.requires_grad_(), *experts.parameters()]
    fuse(model, fused)
    with Stacks() as stacks:
        grouped = experts.grouped(hidden, counts, weights)
    assert len(stacks.made) == 2 and all(storage.expired() for storage in stacks.made)
    fuse(model, False)
    one_by_one = super(LocalExperts, experts).forward(hidden, counts, weights)[0]
    pairs = [(grouped, one_by_one)]
    pairs += zip(*(torch.autograd.grad(output, inputs, upstream) for output in (grouped, one_by_one)), strict=True)
    for actual, expected in pairs:
        assert (actual - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_the_fused_activation_of_a_gpu_gives_the_same_gradients(family: str, ranks: Ranks, tmp_path: Path) -> None:
    policy = Policy(write_model(tmp_path / "model", family), make_config(tmp_path), ranks)
    rows = [one for one in rows_of(3, vocabulary=VOCABULARY, longest=30) if one.inputs]
    results = []
    for fused in (False, True):
        fuse(policy.model, fused)
        results.append(gradients(policy, [rows], merge=True))
    plain, fused_kernel = results
    assert distance(fused_kernel, plain) <= 1e-5
    assert any(not torch.equal(plain[name], fused_kernel[name]) for name in plain)  # they are two ways to compute it
