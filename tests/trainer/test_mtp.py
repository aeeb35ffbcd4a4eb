"""The loss of MTP heads against worked numbers, the tokens of a tree where it is taken, and its metrics."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.trainer.test_tree import paths_in, row, rows_of
from trainer.data.tree import build
from trainer.megatron.mtp.loss import (
    acceptance,
    draft_targets,
    expected_length,
    parents,
    tail_kl,
    trained_draft_targets,
    without_first_tokens,
)

VECTORS = json.loads((Path(__file__).parent / "vectors.json").read_text())
WORKED: dict[str, Any] = VECTORS["topk_kl"]


def logits(values: list[float]) -> Tensor:
    return torch.tensor([values], dtype=torch.float64, requires_grad=True)


def random_logits(seed: int, rows: int = 7, size: int = 11) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    teacher, student = (2 * torch.randn(rows, size, generator=draw, dtype=torch.float64) for _ in range(2))
    return teacher, student.requires_grad_()


def test_the_worked_divergence_and_its_gradient() -> None:
    teacher, student = logits(WORKED["teacher"]), logits(WORKED["student"])
    divergence = tail_kl(teacher, student, WORKED["K"])
    divergence.sum().backward()
    assert divergence.item() == pytest.approx(WORKED["tail"], abs=1e-12)
    assert student.grad is not None and teacher.grad is None
    assert student.grad[0].tolist() == pytest.approx([-0.182705, 0.103752, 0.024254, 0.039988, 0.014711], abs=1e-6)
    assert tail_kl(teacher, student, 5).item() == pytest.approx(WORKED["full"], abs=1e-12)
    assert tail_kl(teacher, student, 99).item() == pytest.approx(WORKED["full"], abs=1e-12)


def test_it_is_not_the_divergence_of_renormalised_distributions() -> None:
    """A control: renormalising would hide that the head puts more probability outside of the chosen tokens."""
    teacher, student = logits(WORKED["teacher"]), logits(WORKED["student"])
    divergence = tail_kl(teacher[:, :2], student[:, :2], 2)
    assert divergence.item() == pytest.approx(WORKED["renorm"], abs=1e-12)
    assert divergence.item() < WORKED["tail"]


@pytest.mark.parametrize("k", [1, 4, 10, 11])
def test_the_gradient_is_that_of_finite_differences(k: int) -> None:
    teacher, student = random_logits(k)
    assert torch.autograd.gradcheck(lambda z: tail_kl(teacher, z, k), (student,), eps=1e-6, atol=1e-8)
    p, q = teacher.softmax(-1), student.detach().softmax(-1)
    (gradient,) = torch.autograd.grad(tail_kl(teacher, student, k).sum(), student)
    chosen = torch.zeros_like(p).scatter(-1, p.topk(k).indices, 1.0) > 0
    outside = 1 - (p * ~chosen).sum(-1, keepdim=True) / (q * ~chosen).sum(-1, keepdim=True)
    assert torch.allclose(gradient, torch.where(chosen, q - p, q * outside), atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_it_lies_between_nothing_and_the_whole_divergence_and_bounds_acceptance(seed: int) -> None:
    teacher, student = random_logits(seed)
    whole = tail_kl(teacher, student, 11)
    assert torch.allclose(whole, (teacher.softmax(-1) * (teacher.log_softmax(-1) - student.log_softmax(-1))).sum(-1))
    parts = [tail_kl(teacher, student, k) for k in range(1, 12)]
    assert all((finer >= coarser - 1e-12).all() for coarser, finer in zip(parts, parts[1:], strict=False))
    assert (parts[0] >= 0).all() and tail_kl(teacher, teacher, 3).abs().max() < 1e-12
    accepted = acceptance(teacher, student)
    assert torch.allclose(accepted, 1 - (teacher.softmax(-1) - student.softmax(-1)).abs().sum(-1) / 2)
    assert (accepted >= 1 - (whole / 2).sqrt() - 1e-12).all()
    assert (acceptance(teacher, teacher) - 1).abs().max() < 1e-12


def test_a_sure_policy_and_a_sure_head_leave_no_infinity() -> None:
    sure = torch.tensor([[200.0, 0.0, -200.0], [200.0, 0.0, -200.0]])
    head = torch.tensor([[200.0, 0.0, -200.0], [-200.0, 0.0, 200.0]], requires_grad=True)
    divergence = tail_kl(sure, head, 1)
    (gradient,) = torch.autograd.grad(divergence.sum(), head)
    assert divergence.tolist() == [0.0, 400.0] and gradient.isfinite().all()
    assert acceptance(sure, head).tolist() == [1.0, 0.0]


def test_the_expected_length_is_that_of_the_closed_form() -> None:
    assert expected_length([0.7] * 3) == pytest.approx(2.533)
    assert expected_length([0.8] * 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8)) == pytest.approx(3.3616)
    assert expected_length([0.5, 0.2]) == pytest.approx(1.6) and expected_length([]) == 1


def test_a_draft_is_learned_where_it_and_what_it_follows_were_sampled() -> None:
    mask = np.array([1, 0, 1, 1, 0], dtype=bool)
    # the worked mask counts from the token that the head's hidden state is of, two before the target
    assert [*draft_targets(mask, 1)[2:].astype(int), 0, 0] == [0, 1, 0, 0, 0]
    assert draft_targets(np.array([1, 1, 1, 1, 0, 1, 1], dtype=bool), 2).tolist() == [0, 0, 1, 1, 0, 0, 0]
    assert not draft_targets(mask[:2], 4).any()


def test_the_parents_of_the_worked_tree() -> None:
    worked = VECTORS["tree"]
    draw = random.Random(0)
    branches = [[ord(name) for name in branch + "Z"] for branch in worked["branches"]]
    tree = build([row(tokens, draw, [False] * (len(tokens) - 1) + [True]) for tokens in branches])
    assert parents(tree.runs).tolist() == [0, *worked["parent"][1:]]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_every_token_follows_its_parent_and_attends_to_its_ancestors_from_a_depth_on(seed: int, depth: int) -> None:
    tree = build([one for one in rows_of(seed) if one.inputs])
    paths, before = paths_in(tree.tokens, tree.runs), parents(tree.runs)
    assert all(paths[before[at]] == (path[:-1] or path) for at, path in enumerate(paths))
    runs = without_first_tokens(tree.runs, depth)
    assert [run.start for run in runs] + [runs[-1].end] == [0] + [run.end for run in runs]
    expected = [path[depth:] if len(path) > depth else path[-1:] for path in paths]
    assert paths_in(tree.tokens, list(runs)) == expected


@pytest.mark.parametrize("depth", [1, 3])
def test_places_are_those_of_each_row_by_itself(depth: int) -> None:
    rows = [one for one in rows_of(4) if one.inputs]
    targets = np.flatnonzero(trained_draft_targets(rows, depth))
    flat = [(one, at) for one in rows for at in one.places]
    expected = [i for i, (one, at) in enumerate(flat) if at >= depth and one.trained[at - depth : at + 1].all()]
    assert targets.tolist() == expected and expected
    assert len(trained_draft_targets([], depth)) == 0
