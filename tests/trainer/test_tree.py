"""Prefix trees: layout, attention, cutting; and training by trees gives the same loss and gradients as without."""

import json
import random
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from proxy.pool.errors import UserError
from tests.trainer.make import VOCABULARY, cpu_only, make_config, make_rows, write_model
from trainer.data.micro_batch import MicroBatch
from trainer.data.packing import ContextShard, divide, pack, plan
from trainer.data.row import TrainingRow
from trainer.data.tree import SortedRows, TokenRun, build, cut, order
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import LossTokens, policy_loss
from trainer.megatron.attention.kernels import tree_attention
from trainer.megatron.attention.layout import AttentionLayout, slices
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy

TREE: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())["tree"]


def row(tokens: list[int], draw: random.Random, trained: list[bool] | None = None) -> TrainingRow:
    size = len(tokens)
    mask = trained if trained is not None else [False] + [draw.random() < 0.7 for _ in tokens[1:]]
    logp = np.array([draw.uniform(-4, -1) for _ in tokens], dtype=np.float32)
    advantage = np.full(size, draw.gauss(0, 1), dtype=np.float32)
    kept = np.array(mask, dtype=bool)
    return TrainingRow(np.array(tokens), kept, logp, advantage, np.zeros(size, dtype=np.int64), draw.uniform(0.5, 2))


def rows_of(seed: int, count: int = 9, vocabulary: int = 3, longest: int = 14) -> list[TrainingRow]:
    """Random branching rows: duplicates, rows that begin others, different lengths, several roots, mixed advantages."""
    draw = random.Random(seed)
    sequences = [[draw.randrange(vocabulary) for _ in range(draw.randint(2, longest))] for _ in range(count)]
    sequences += [
        list(sequences[0]),
        sequences[1][: max(2, len(sequences[1]) // 2)],
        sequences[2] + [draw.randrange(vocabulary)] * 3,
    ]
    draw.shuffle(sequences)
    return [row(tokens, draw) for tokens in sequences]


def ancestors(rows: list[TrainingRow]) -> set[tuple[int, ...]]:
    """The nodes of the trie, each as its path."""
    return {tuple(one.tokens[: end + 1].tolist()) for one in rows for end in range(one.inputs)}


def paths_in(tokens: np.ndarray, runs: list[TokenRun]) -> list[tuple[int, ...]]:
    """For each token of the layout, the token ids that it attends to."""
    last = np.concatenate([np.full(run.end - run.start, run.last) for run in runs])
    return [tuple(int(tokens[j]) for j in range(i + 1) if i < last[j]) for i in range(len(tokens))]


def test_the_worked_example() -> None:
    draw = random.Random(0)
    # one token more for each branch, as the last one of a row is no input
    rows = [
        row([ord(name) for name in branch + "Z"], draw, [False] * len(branch) + [True]) for branch in TREE["branches"]
    ]
    tree = build(rows)
    last = [run.last for run in tree.runs for _ in range(run.start, run.end)]
    assert "".join(map(chr, tree.tokens)) == TREE["dfs"] and tree.positions.tolist() == TREE["depth"]
    assert last == TREE["sub_end"]
    above = [max((j for j in range(i) if i < last[j]), default=-1) for i in range(len(last))]  # the nearest ancestor
    paths = [list(path) for path in paths_in(tree.tokens, tree.runs)]
    through = [sum(path == one.tokens[: len(path)].tolist() for one in rows) for path in paths]
    assert above == TREE["parent"] and through == TREE["count"]
    pairs = sorted(
        ([list(part.queries), list(part.keys), int(part.causal)] for part in slices(whole(tree.runs))), key=str
    )
    assert pairs == sorted(TREE["slices"], key=str)


@pytest.mark.parametrize("seed", range(100))
def test_every_token_attends_to_exactly_its_ancestors(seed: int) -> None:
    rows = rows_of(seed)
    tree = build(rows)
    paths = paths_in(tree.tokens, tree.runs)
    assert len(paths) == len(set(paths)) and set(paths) == ancestors(rows)
    assert [len(path) - 1 for path in paths] == tree.positions.tolist()
    pairs = [(q, k) for part in slices(whole(tree.runs)) for q, k in covered(part.queries, part.keys, part.causal)]
    last = [run.last for run in tree.runs for _ in range(run.start, run.end)]
    assert len(pairs) == len(set(pairs)) and len(slices(whole(tree.runs))) <= 2 * len(tree.runs)
    assert set(pairs) == {(i, j) for i in range(len(last)) for j in range(i + 1) if i < last[j]}


def whole(runs: list[TokenRun]) -> AttentionLayout:
    return AttentionLayout(tuple(runs), (0, runs[-1].end))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("world", [2, 3])
def test_stretches_of_queries_cover_the_same_pairs(seed: int, world: int) -> None:
    runs = tuple(build(rows_of(seed)).runs)
    size, pairs = -(-runs[-1].end // world), []
    for rank in range(world):
        stretch = size * rank, min(size * (rank + 1), runs[-1].end)
        for part in slices(AttentionLayout(runs, stretch)):
            queries = (part.queries[0] + stretch[0], part.queries[1] + stretch[0])
            assert not part.causal or queries == part.keys
            pairs += covered(queries, part.keys, part.causal)
    assert len(pairs) == len(set(pairs))
    assert set(pairs) == {(i, j) for run in runs for j in range(run.start, run.end) for i in range(j, run.last)}


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("world", "multiple"), [(2, 1), (3, 2), (5, 4)])
def test_ranks_that_share_a_micro_batch_have_every_trained_token_once(seed: int, world: int, multiple: int) -> None:
    short = row([1, 2], random.Random(seed), [False, True])  # a single input: fewer than ranks
    for rows in ([one for one in rows_of(seed) if one.inputs], [short], []):
        shares = [pack(rows, ContextShard(torch.device("cpu"), rank, world, multiple)) for rank in range(world)]
        size = {len(packed.tokens) for packed, _ in shares}
        assert len(size) == 1 and size.pop() % multiple == 0
        assert all(packed.rows.numel() == 0 or packed.rows.max() < len(packed.tokens) for packed, _ in shares)
        asked = [one for packed, tokens in shares for one in asked_of(packed, tokens)]
        packed, tokens = pack(rows, ContextShard(torch.device("cpu")))
        assert sorted(asked) == sorted(asked_of(packed, tokens)) and len(asked) == sum(len(one.places) for one in rows)
        assert tokens.segment is not None
        for share, own in shares:  # each numbers the segments of its tokens from 0
            assert own.segment is not None
            theirs = (share.queries[0] <= packed.nodes) & (packed.nodes < share.queries[1])
            both = set(zip(tokens.segment[torch.from_numpy(theirs)].tolist(), own.segment.tolist(), strict=True))
            numbers = {number for _, number in both}
            assert numbers == set(range(len(both))) and len({segment for segment, _ in both}) == len(both)


def asked_of(packed: MicroBatch, tokens: LossTokens) -> list[tuple[float, ...]]:
    """Each trained token with the last token and position of its context, and its entries in the loss."""
    assert tokens.scale is not None
    at = packed.rows[packed.branches]
    columns = [packed.tokens[at], packed.positions[at], packed.labels[packed.branches]]
    columns += [tokens.rollout_logp, tokens.advantage, tokens.scale, tokens.mask]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def covered(queries: tuple[int, int], keys: tuple[int, int], causal: bool) -> list[tuple[int, int]]:
    return [(q, k) for q in range(*queries) for k in range(*keys) if k <= q or not causal]


@pytest.mark.parametrize("seed", range(50))
def test_every_trained_token_is_asked_at_its_own_context(seed: int) -> None:
    rows = rows_of(seed)
    tree = build(rows)
    paths = paths_in(tree.tokens, tree.runs)
    asked = [(paths[tree.parents[edge]], int(tree.labels[edge])) for edge in tree.edges]
    flat = [(tuple(one.tokens[:at].tolist()), int(one.tokens[at])) for one in rows for at in one.places]
    assert asked == flat and len(set(asked)) == len(tree.parents)


def test_separate_completions_of_one_history_are_one_run() -> None:
    draw = random.Random(0)
    history = [draw.randrange(90) for _ in range(300)]
    rows = [row(history[: 30 * turn], draw, [False] * (30 * turn - 10) + [True] * 10) for turn in range(1, 11)]
    assert build(rows).runs == [TokenRun(0, 299, 299, 0)]


def test_without_merging_each_row_is_a_tree() -> None:
    rows = rows_of(1)
    tree = build(rows, merge=False)
    assert len(tree.runs) == sum(one.inputs > 0 for one in rows) and len(tree.tokens) == sum(one.inputs for one in rows)


@pytest.mark.parametrize("seed", range(30))
def test_a_cut_repeats_as_little_as_possible(seed: int) -> None:
    ordered = order(rows_of(seed, count=5))
    budget = max(one.inputs for one in ordered.rows) + 4
    parts = cut(ordered, budget)
    assert [id(one) for part in parts for one in part.rows] == [id(one) for one in ordered.rows]
    assert all(len(ancestors(part.rows)) == part.unique(0, len(part.rows)) <= budget for part in parts)
    assert sum(part.unique(0, len(part.rows)) for part in parts) == least(ordered, budget)


def least(ordered: SortedRows, budget: int) -> int:
    """The least number of tokens over every way of cutting the sorted rows."""
    places, totals = range(1, len(ordered.rows)), []
    for count in range(len(ordered.rows)):
        for cuts in combinations(places, count):
            sizes = [
                len(ancestors(ordered.rows[a:b])) for a, b in zip((0, *cuts), (*cuts, len(ordered.rows)), strict=True)
            ]
            if max(sizes) <= budget:
                totals.append(sum(sizes))
    return min(totals)


def test_a_path_over_the_budget_is_refused() -> None:
    with pytest.raises(UserError, match="batch.max_tokens = 5 is below a recorded path of"):
        plan(rows_of(0), 1, 5)


@pytest.mark.parametrize("ranks_count", [1, 2, 3])
def test_trees_stay_together_and_ranks_get_equal_work(ranks_count: int) -> None:
    rows = [one for seed in range(40) for one in rows_of(seed, vocabulary=50)]
    planned = plan(rows, ranks_count, 60)
    placed = [one for rank in planned for micro in rank for one in micro]
    assert sorted(map(id, placed)) == sorted(id(one) for one in rows if one.inputs)
    assert all(len(ancestors(micro)) <= 60 for rank in planned for micro in rank)
    assert len({len(rank) for rank in planned}) == 1
    costs = [sum(piece.cost for micro in rank for piece in divide(micro, 60)) for rank in planned]
    assert max(costs) <= 1.1 * sum(costs) / ranks_count


def test_a_step_that_teaches_nothing_has_one_empty_micro_batch_for_each_rank() -> None:
    assert plan([], 2, 100) == [[[]], [[]]]
    assert plan([row([1, 2], random.Random(0), [False, False])], 2, 100) == [[[]], [[]]]


def dense(query: Tensor, key: Tensor, value: Tensor, layout: AttentionLayout, scale: float) -> Tensor:
    last = torch.tensor([run.last for run in layout.runs for _ in range(run.start, run.end)])
    at = torch.arange(len(last))
    mask = (at[None] <= at[:, None]) & (at[:, None] < last[None])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_attention_by_slices_equals_the_dense_mask(seed: int, dtype: torch.dtype, tolerance: float) -> None:
    runs = build(rows_of(seed, count=12, longest=40)).runs
    draw = torch.Generator().manual_seed(seed)
    shapes = [(1, heads, runs[-1].end, 8) for heads in (4, 2, 2)]
    q, k, v = inputs = [(3 * torch.randn(shape, generator=draw, dtype=dtype)).requires_grad_() for shape in shapes]
    upstream = torch.randn(shapes[0], generator=draw, dtype=dtype)
    actual, expected = (kernel(q, k, v, whole(runs), 0.3) for kernel in (tree_attention, dense))
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    gradients = [torch.autograd.grad(output, inputs, upstream) for output in (actual, expected)]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours - theirs).norm() <= 10 * tolerance * theirs.norm()


def test_many_slices_lose_no_more_in_half_precision_than_one_call_does() -> None:
    """A history with a branch after every turn: the last tokens combine a hundred slices."""
    draw, generator = random.Random(0), torch.Generator().manual_seed(0)
    history = [draw.randrange(90) for _ in range(600)]
    runs = build([row(history[: 6 * turn] + [90 + turn] * 3, draw) for turn in range(1, 101)]).runs
    drawn = [
        torch.randn(1, heads, runs[-1].end, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4)
    ]

    def results(kernel: Any, dtype: torch.dtype) -> list[Tensor]:
        *inputs, upstream = (tensor.to(dtype).requires_grad_() for tensor in drawn)
        output = kernel(*inputs, whole(runs), 0.25)
        return [output.detach(), *torch.autograd.grad(output, inputs, upstream)]

    exact, one_call, sliced = (
        results(*given) for given in ((dense, torch.float64), (dense, torch.bfloat16), (tree_attention, torch.bfloat16))
    )
    for right, one, ours in zip(exact, one_call, sliced, strict=True):
        assert (ours - right).norm() <= 1.3 * (one - right).norm()


def gradients(policy: Policy, micros: list[list[TrainingRow]], kind: str, merge: bool) -> dict[str, Tensor]:
    """The loss and every parameter's gradient."""
    policy.ddp.zero_grad_buffer()
    total = torch.zeros((), dtype=torch.float64, device=policy.shard.device)
    for rows in micros:
        packed, tokens = pack(rows, policy.shard, merge)
        loss = policy_loss(policy.ddp(packed)[packed.branches], tokens, rule_of(kind, 0.8, 1.3))[0]
        loss.backward()
        total += loss.detach()
    return {name: param.main_grad.clone() for name, param in policy.model.named_parameters()} | {"loss": total}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(distances(left, right).values())


def distances(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    assert all(right[name].norm() > 0 for name in right)
    return {name: float((left[name] - right[name]).norm() / right[name].norm()) for name in right}


SHORT = [("qwen3", "cispo"), ("llama", "ppo"), ("qwen3_moe", "gspo")]
"""Each family and each loss once; `make test-all` tries them all."""


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        pytest.param(*both, marks=() if both in SHORT else pytest.mark.long)
        for both in product(("qwen3", "llama", "qwen3_moe"), ("cispo", "ppo", "gspo"))
    ],
)
def test_trees_give_the_loss_and_gradient_of_separate_rows(
    kind: str, family: str, ranks: Ranks, tmp_path: Path
) -> None:
    policy = Policy(write_model(tmp_path / "model", family), make_config(tmp_path), ranks)
    rows = [one for seed in (1, 2) for one in rows_of(seed, vocabulary=VOCABULARY, longest=30)]
    rows += rows_of(3, vocabulary=2, longest=20)
    flat = gradients(policy, [[one] for one in rows if one.inputs], kind, merge=False)
    for budget in (35, 80, 10_000):
        (micros,) = plan(rows, 1, budget)
        assert distance(gradients(policy, micros, kind, merge=True), flat) <= 1e-5
        assert sum(len(build(micro).tokens) for micro in micros) < sum(one.inputs for one in rows)


def test_positions_and_the_mask_matter_in_these_rows(ranks: Ranks, tmp_path: Path) -> None:
    """A control: positions counted along the row, or no mask between branches, give other logprobs."""
    policy = Policy(write_model(tmp_path / "model"), make_config(tmp_path), ranks)
    rows = [one for one in rows_of(3, vocabulary=2, longest=20) if one.inputs]
    packed, _ = pack(rows, policy.shard)
    size = len(packed.tokens)
    right = policy.logprobs(packed)
    counted = replace(packed, positions=torch.arange(size, device=packed.positions.device))
    unmasked = replace(packed, runs=(TokenRun(0, size, size, 0),))
    for wrong in (counted, unmasked):
        assert (policy.logprobs(wrong) - right).abs().max() > 0.1


def test_the_same_packing_gives_a_ratio_of_exactly_one(ranks: Ranks, tmp_path: Path) -> None:
    policy = Policy(write_model(tmp_path / "model"), make_config(tmp_path), ranks)
    for micro in plan(rows_of(4, vocabulary=4), 1, 60)[0]:
        packed, _ = pack(micro, policy.shard)
        assert torch.equal(policy.logprobs(packed), policy.ddp(packed)[packed.branches].detach())


@cpu_only("FlexAttention knows no double precision")
@pytest.mark.parametrize(
    "family",
    ["qwen3", *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen2", "qwen3_moe")), "qwen3_moe_mixed"],
)
def test_in_double_precision_nothing_is_left_of_the_difference(family: str, ranks: Ranks, tmp_path: Path) -> None:
    """Through the same Megatron layers, every parameter's gradient to 1e-9."""
    model = Policy(write_model(tmp_path / "model", family), make_config(tmp_path), ranks).model.double()
    parameters = dict(model.named_parameters())

    def gradient(micros: list[list[TrainingRow]], merge: bool) -> dict[str, Tensor]:
        losses = []
        for rows in micros:
            packed, tokens = pack(rows, ContextShard(ranks.device), merge)
            # from the logits: Megatron's cross entropy works in single precision
            logp = model.logits(packed).view(-1, VOCABULARY).log_softmax(-1)
            edges = logp.gather(1, packed.labels[:, None])[:, 0]
            losses.append(policy_loss(edges[packed.branches], tokens, rule_of("cispo", 0.8, 1.3))[0])
        total = torch.stack(losses).sum()
        gradients = torch.autograd.grad(total, list(parameters.values()))
        return dict(zip(parameters, gradients, strict=True)) | {"loss": total.detach()}

    rows = [one for seed, size in ((5, 3), (6, VOCABULARY)) for one in rows_of(seed, 9, size, 25) if one.inputs]
    flat = gradient([[one] for one in rows], merge=False)
    assert flat["loss"].dtype == torch.float64
    for budget in (30, 10_000):
        assert distance(gradient(plan(rows, 1, budget)[0], merge=True), flat) <= 1e-9


@pytest.mark.parametrize("distributed", [pytest.param(False, marks=pytest.mark.long), True])
def test_in_half_precision_trees_are_as_near_as_separate_rows(distributed: bool, ranks: Ranks, tmp_path: Path) -> None:
    """Compares with the gradients in single precision of the same rounded weights."""
    half = {"precision": "bfloat16", "distributed_optimizer": distributed}
    first = Policy(write_model(tmp_path / "model"), make_config(tmp_path, parallel=half), ranks)
    first.write_hf(tmp_path / "rounded")
    exact = Policy(tmp_path / "rounded", make_config(tmp_path), ranks)
    rows = [one for seed in (1, 2, 3) for one in rows_of(seed, vocabulary=4, longest=30) if one.inputs]
    flat = [[one] for one in rows]
    right = gradients(exact, flat, "cispo", merge=False)
    separate = distances(gradients(first, flat, "cispo", merge=False), right)
    merged = distances(gradients(first, plan(rows, 1, 60)[0], "cispo", merge=True), right)
    assert 1e-4 < max(separate.values()) < 0.05
    assert all(merged[name] <= 1.5 * separate[name] + 1e-3 for name in right)


def test_logits_in_parts_give_the_same_gradient(ranks: Ranks, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen2")  # whose head is its embedding
    rows = [one for one in rows_of(3, vocabulary=2, longest=20) if one.inputs]
    at_once = Policy(model, make_config(tmp_path), ranks)
    expected = gradients(at_once, [rows], "cispo", merge=True)
    for size, recompute in ((5, False), (7, True)):
        policy = Policy(model, make_config(tmp_path, parallel={"recompute": recompute}), ranks)
        policy.model.logits_tokens = size
        assert distance(gradients(policy, [rows], "cispo", merge=True), expected) <= 1e-6


def test_parts_add_up_the_gradient_of_a_half_precision_head_in_single_precision(ranks: Ranks, tmp_path: Path) -> None:
    config = make_config(tmp_path, parallel={"precision": "bfloat16"})
    policy = Policy(write_model(tmp_path / "model"), config, ranks)
    packed, _ = pack(make_rows(12), policy.shard)
    weight = policy.model.output_layer.weight
    grads = []
    for size in (1000, 1):
        policy.model.logits_tokens = size
        policy.ddp.zero_grad_buffer()
        policy.ddp(packed).sum().backward()
        grads.append(vars(weight)["main_grad"].clone())
    assert (grads[1] - grads[0]).norm() <= 3e-3 * grads[0].norm()  # each part is rounded to bf16, their sum is not


class Logits(TorchDispatchMode):
    """Records the largest number of rows of logits in one tensor, in forward and backward passes."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for one in results if isinstance(results, tuple) else (results,):
            if isinstance(one, Tensor) and one.dim() == 3 and one.shape[-1] == VOCABULARY:
                self.rows = max(self.rows, one.numel() // VOCABULARY)
        return results


@cpu_only("torch compiles nothing while a dispatch mode looks on, and FlexAttention is slow and large uncompiled")
def test_logits_of_all_tokens_never_exist_at_once(ranks: Ranks, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    rows = [one for one in rows_of(3, vocabulary=2, longest=20) if one.inputs]
    packed, _ = pack(rows, ContextShard(ranks.device))
    for size, most in ((5, 5), (4096, len(packed.rows))):
        policy = Policy(model, make_config(tmp_path), ranks)
        policy.model.logits_tokens = size
        with Logits() as seen:
            policy.ddp(packed).sum().backward()
        assert seen.rows == most <= len(packed.rows)


def test_the_likeliest_tokens_are_found_some_logits_at_a_time(ranks: Ranks, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    whole, parts = (Policy(model, make_config(tmp_path), ranks) for _ in range(2))
    parts.model.logits_tokens = 5
    packed, _ = pack([one for one in rows_of(3, vocabulary=2, longest=20) if one.inputs], whole.shard)
    sizes = list[int]()
    parts.model.output_layer.register_forward_hook(lambda _module, _inputs, output: sizes.append(len(output[0])))
    expected = whole.model.logits(packed).argmax(-1).view(-1)[packed.branches]
    assert torch.equal(parts.best(packed), expected) and torch.equal(whole.best(packed), expected)
    assert max(sizes) == 5 and sum(sizes) == len(packed.rows)


def test_the_head_may_be_in_single_precision(ranks: Ranks, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    packed, _ = pack([one for one in rows_of(3, vocabulary=2) if one.inputs], ContextShard(ranks.device))
    rounded, fine = (
        Policy(model, make_config(tmp_path, parallel={"precision": "bfloat16"} | head), ranks).model.logits(packed)
        for head in ({}, {"head_float32": True})
    )
    assert (rounded.dtype, fine.dtype) == (torch.bfloat16, torch.float32)
    assert (fine != fine.bfloat16()).any() and (fine - rounded).norm() < 0.01 * fine.norm()
