"""CISPO against numbers worked by hand (algorithms vectors of slime and SkyRL) and its gradient."""

import math

import pytest
import torch

from trainer.loss import Tokens, cispo, read_sums


def tokens(rollout: list[float], advantage: list[float], mask: list[float] | None = None) -> Tokens:
    return Tokens(
        torch.tensor(rollout, dtype=torch.float64),
        torch.tensor(advantage, dtype=torch.float64),
        torch.tensor(mask or [1.0] * len(rollout)),
    )


def leaf(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(
    ("bounds", "ratios", "total", "gradient", "clipped"),
    [
        ((0.8, 1.28), [1, 1.14, 1.56, 0.4], -0.64, [-1, 0.57, -2.56, 0.8], 0.5),
        ((0.0, 5.0), [1, 3, 9, 0.4], 2.06, [-1, 1.5, -10, 0.4], 0.25),
    ],
)
def test_slime_vectors(
    bounds: tuple[float, float], ratios: list[float], total: float, gradient: list[float], clipped: float
) -> None:
    logp = leaf([-0.7, -1.2, -0.4, -2.1])
    rollout = [value - math.log(ratio) for value, ratio in zip(logp.tolist(), ratios, strict=True)]
    loss, said = cispo(logp, tokens(rollout, [1, -0.5, 2, -1]), *bounds)
    loss.backward()
    assert loss.item() == pytest.approx(total)
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx(gradient)
    assert read_sums(said)["clip_fraction"] == clipped


def test_skyrl_vector_against_rollout_logprobs() -> None:
    logp = leaf([-1.69315, -1, -0.69741])
    loss, _ = cispo(logp, tokens([-1.30685, -1.5, -1.0], [1, -1, -4]), 0.8, 1.2)
    assert loss.item() == pytest.approx(-3.193048, abs=1e-6)


@pytest.mark.parametrize(
    ("floor", "cap", "total"), [(0.8, 1.28, -2.085256127), (0.0, 1.28, -2.949497245), (0.0, 5.0, -13.749606772)]
)
def test_one_vector_with_every_bound(floor: float, cap: float, total: float) -> None:
    logp = leaf([-1, -0.5, -2, -0.1, -3, -1.5])
    rollout = [-1, -1.2, -1, -0.4, -4.8, -1.4]
    loss, _ = cispo(logp, tokens(rollout, [1, 1, 1, -1, -1, -1]), floor, cap)
    assert loss.item() == pytest.approx(total)


def test_the_gradient_goes_through_logp_only() -> None:
    logp = leaf([-1.0, -2.0])
    batch = tokens([-3.0, -2.5], [1.5, -0.5])
    cispo(logp, batch, 0.0, 5.0)[0].backward()
    weight = (logp.detach() - batch.rollout_logp).exp().clamp(0, 5)
    assert logp.grad is not None and torch.equal(logp.grad, -weight * batch.advantage)


def test_masked_entries_may_hold_anything() -> None:
    logp = leaf([-1.0, -2.0, -3.0])
    loss, said = cispo(logp, tokens([-1.0, -math.inf, math.nan], [1, 1, math.nan], [1, 0, 0]), 0.0, 5.0)
    loss.backward()
    assert loss.item() == 1.0 and read_sums(said)["ratio_max"] == 1.0
    assert logp.grad is not None and logp.grad.tolist() == [-1, 0, 0]


def test_an_absurd_ratio_stays_finite() -> None:
    logp = leaf([-1.0])
    loss, said = cispo(logp, tokens([-1000.0], [1]), 0.0, 5.0)
    assert loss.item() == 5.0 and math.isfinite(read_sums(said)["kl_rollout"])


def test_the_sum_is_the_same_for_any_split() -> None:
    logp, batch = leaf([-1, -0.5, -2, -0.1]), tokens([-1, -1.2, -1, -0.4], [1, 1, -1, 2])
    whole = cispo(logp, batch, 0.0, 1.28)[0].item()
    parts = 0.0
    for index in range(4):
        one = slice(index, index + 1)
        part = Tokens(batch.rollout_logp[one], batch.advantage[one], batch.mask[one])
        parts += cispo(logp[one], part, 0.0, 1.28)[0].item()
    assert parts == pytest.approx(whole, rel=1e-12)


def test_an_empty_micro_batch_is_zero_with_a_gradient() -> None:
    logp = leaf([])
    loss, said = cispo(logp, tokens([], []), 0.0, 5.0)
    loss.backward()
    assert loss.item() == 0 and read_sums(said)["ratio_mean"] == 0
