"""Every loss against published and hand-worked numbers (vectors.json), and its gradient against finite differences."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.config import Loss
from trainer.config.estimators import Norm
from trainer.credit.token_weights import token_scales
from trainer.loss.named_losses import KINDS, configured, decoupled_ppo, ipa, rule_of
from trainer.loss.policy_loss import LossRule, LossTokens, imitation, policy_loss, read_sums
from trainer.loss.ratios import Window, divergences, log_ratio, ratio

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())
EVERY = VECTORS["all_variants"]


def tensor(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(rollout: list[float], advantage: list[float], mask: list[float] | None = None, **more: Any) -> LossTokens:
    given = tensor(mask if mask is not None else [1.0] * len(rollout))
    return LossTokens(rollout_logp=tensor(rollout), advantage=tensor(advantage), mask=given, **more)


def leaf(values: list[float]) -> Tensor:
    return tensor(values).requires_grad_()


@pytest.mark.parametrize("case", VECTORS["cispo_slime"]["cases"])
def test_cispo_of_slime(case: dict[str, Any]) -> None:
    given = VECTORS["cispo_slime"]
    logp = leaf(given["logp"])
    rollout = [value - math.log(ratio) for value, ratio in zip(given["logp"], case["ratio"], strict=True)]
    loss, sums = policy_loss(logp, tokens(rollout, given["adv"]), rule_of("cispo", *case["bounds"]))
    loss.backward()
    assert loss.item() == pytest.approx(sum(case["loss"]))
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx(case["grad"])
    clipped = sum(w != r for w, r in zip(case["w"], case["ratio"], strict=True)) / len(rollout)
    assert read_sums(sums)["clip_fraction"] == clipped


@pytest.mark.parametrize("anchor", ["old", "rollout"])
def test_cispo_of_skyrl(anchor: str) -> None:
    given = VECTORS["cispo_skyrl"]
    loss, _ = policy_loss(leaf(given["logp"]), tokens(given[anchor], given["adv"]), rule_of("cispo", *given["bounds"]))
    assert loss.item() == pytest.approx(given[f"sum_anchor_{anchor}"], abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "low", "high", "name"),
    [
        ("cispo", 0.8, 1.28, "cispo_0.8_1.28"),
        ("cispo", 0.0, 1.28, "cispo_0_1.28"),
        ("cispo", 0.0, 5.0, "cispo_0_5"),
        ("cispo_unified", 0.8, 1.28, "cispo_unified_.2_.28"),
        ("glm5", 0.8, 1.28, "glm5_.2_.28"),
        ("glm5", 0.7, 6.0, "sao_.3_5"),
        ("glm5", 0.2, 4.0, "sao_.8_3"),
        ("ppo", 0.8, 1.28, "ppo_.2_.28"),
        ("dppo_tv", 0.0, 0.2, "dppo_tv_.2_k2_1e-3"),
    ],
)
def test_one_vector_with_every_loss(kind: str, low: float, high: float, name: str) -> None:
    logp, batch = leaf(EVERY["logp"]), tokens(EVERY["mu"], EVERY["adv"])
    loss, _ = policy_loss(logp, batch, rule_of(kind, low, high))
    assert loss.item() == pytest.approx(EVERY["sum"][name], abs=1e-9)


def test_the_gradient_of_ppo_is_zero_where_it_clips() -> None:
    logp = leaf(EVERY["logp"])
    policy_loss(logp, tokens(EVERY["mu"], EVERY["adv"]), rule_of("ppo", 0.8, 1.28))[0].backward()
    expected = [-1, 0, -0.367879441, 1.349858808, 6.049647464, 0.904837418]
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx(expected)


def test_decoupled_ppo_and_its_collapse_on_policy() -> None:
    batch = tokens(EVERY["mu"], EVERY["adv"], old_logp=tensor(EVERY["prox"]))
    loss, _ = policy_loss(leaf(EVERY["logp"]), batch, decoupled_ppo(0.8, 1.2))
    assert loss.item() == pytest.approx(EVERY["sum"]["decoupled_ppo_.2"], abs=1e-9)
    same = tokens(EVERY["mu"], EVERY["adv"], old_logp=tensor(EVERY["mu"]))
    collapsed, _ = policy_loss(leaf(EVERY["logp"]), same, decoupled_ppo(0.8, 1.28))
    assert collapsed.item() == pytest.approx(EVERY["sum"]["ppo_.2_.28"], abs=1e-9)


def test_in_the_one_update_of_a_batch_decoupled_ppo_weighs_by_old_over_rollout() -> None:
    logp = leaf([-1.0, -1.0, -1.0])
    old, rollout = logp.detach(), [-1.5, -0.5, -3.0]  # old / rollout: e^0.5, e^-0.5, and e^2 > 5
    loss, sums = policy_loss(logp, tokens(rollout, [1, -2, 1], old_logp=old), rule_of("decoupled_ppo", 0.8, 1.28))
    loss.backward()
    weights = [math.exp(0.5), math.exp(-0.5), 0.0]
    assert loss.item() == pytest.approx(-weights[0] + 2 * weights[1])
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-weights[0], 2 * weights[1], 0])
    metrics = read_sums(sums)
    assert (metrics["ratio_mean"], metrics["clip_fraction"]) == (1, 0) and metrics["mask_fraction"] == pytest.approx(
        1 / 3
    )


@pytest.mark.parametrize(
    ("kind", "low", "high", "weights"),
    [
        ("tis", 0.8, 1.28, [1, 1.28, 0.367879441, 1.28, 1.28, 0.904837418]),  # no lower bound
        ("icepop", 0.9, 2.1, [1, 2.013752707, 0, 1.349858808, 0, 0.904837418]),
        (
            "cispo_completion",
            0.0,
            5.0,
            [math.exp(-0.1)] * 3 + [math.exp(2 / 3)] * 3,
        ),  # logs 0, 0.7, -1 and 0.3, 1.8, -0.1
        ("cispo_completion", 0.95, 1.5, [0.95] * 3 + [1.5] * 3),
    ],
)
def test_what_a_kind_weighs(kind: str, low: float, high: float, weights: list[float]) -> None:
    logp, segment = leaf(EVERY["logp"]), torch.tensor([0, 0, 0, 1, 1, 1])
    policy_loss(logp, tokens(EVERY["mu"], EVERY["adv"], segment=segment), rule_of(kind, low, high))[0].backward()
    expected = [-weight * advantage for weight, advantage in zip(weights, EVERY["adv"], strict=True)]
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_gspo_is_the_surrogate_of_a_completions_geometric_mean(sign: float) -> None:
    """The ratio of the first completion is e^-0.1, below 0.95; that of the second e^(2/3), above 1.5."""
    logp, segment = leaf(EVERY["logp"]), torch.tensor([0, 0, 0, 1, 1, 1])
    batch = tokens(EVERY["mu"], [sign * value for value in EVERY["adv"]], segment=segment)
    loss, sums = policy_loss(logp, batch, rule_of("gspo", 0.95, 1.5))
    loss.backward()
    low, high = math.exp(-0.1), math.exp(2 / 3)
    # Advantages are 1 and -1: neither is clipped. With the other sign both are, and have no gradient.
    assert loss.item() == pytest.approx(3 * (high - low) if sign > 0 else 3 * (0.95 - 1.5))
    slopes = [-low] * 3 + [high] * 3 if sign > 0 else [0.0] * 6
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx(slopes)
    assert read_sums(sums)["clip_fraction"] == (0 if sign > 0 else 1)


@pytest.mark.parametrize(
    ("norm", "rollouts", "shares"),
    [
        ("rollout", (0, 1), (1 / 2, 1 / 2)),  # the paper: each response weighs alike
        ("token", (0, 1), (1 / 4, 3 / 4)),  # the default: by its length
        ("rollout", (0, 0), (1 / 4, 3 / 4)),  # two turns of one rollout: by length within it
    ],
)
def test_gspo_as_published_needs_the_mean_over_rollouts(
    norm: Norm, rollouts: tuple[int, int], shares: tuple[float, float]
) -> None:
    """Responses of 1 and 3 tokens, whose ratios are e^0.2 and e^0.1, with the advantages 1 and -1."""
    logp, segment = leaf([-1.0, -1.0, -1.0, -1.0]), torch.tensor([0, 1, 1, 1])
    scales = token_scales([1, 3], rollouts, norm)
    batch = replace(
        tokens([-1.2, -1.3, -1.0, -1.0], [1.0, -1.0, -1.0, -1.0], segment=segment),
        scale=torch.tensor([scales[0], *[scales[1]] * 3], dtype=torch.float64),
    )
    loss, _ = policy_loss(logp, batch, rule_of("gspo", 0.0, 9.0))
    loss.backward()
    first, second = shares[0] * math.exp(0.2), shares[1] * math.exp(0.1)
    assert loss.item() == pytest.approx(second - first)
    assert logp.grad is not None and logp.grad.tolist() == pytest.approx([-first, *[second / 3] * 3])


def recomputed(**settings: Any) -> LossRule:
    return configured(Loss(**settings))


def test_level_and_correction_of_the_losses_with_recomputed_logprobs() -> None:
    given = VECTORS["mis"]
    logp, old = leaf(given["old"]), tensor(given["old"])
    segment = torch.zeros(4, dtype=torch.long)
    batch = tokens(given["mu"], [1.0] * 4, old_logp=old, segment=segment)
    ratios = given["ratio"]
    expected = {
        ("token", "reject"): [value if value <= 2 else 0 for value in ratios],
        ("token", "mask"): [float(value <= 2) for value in ratios],
        ("token", "tis"): [min(value, 2) for value in ratios],
        ("token", "icepop"): [value if 0.5 <= value <= 2 else 0 for value in ratios],
        ("geometric", "tis"): [min(given["geo"], 2)] * 4,
        ("sequence", "icepop"): [given["seq"] if 0.5 <= given["seq"] <= 2 else 0] * 4,
    }
    for (level, correction), weights in expected.items():
        rule = recomputed(kind="decoupled_ppo", mismatch=2, level=level, correction=correction)
        [gradient] = torch.autograd.grad(policy_loss(logp, batch, rule)[0], logp)
        assert (-gradient).tolist() == pytest.approx(weights), (level, correction)
    assert recomputed(kind="ipa", cap=3, correction="tis", level="token").correction == Window(high=3)
    assert recomputed(kind="decoupled_ppo", mismatch=2) == decoupled_ppo(0, 5, 2) and recomputed(kind="ipa") == ipa(5.0)


def test_the_divergence_from_the_reference() -> None:
    """k3 = e^d - 1 - d and its gradient 1 - e^d, with d = log(reference / policy)."""
    logp, advantage = leaf([-1.0, -2.0, -1.0]), [0.0, 0.0, 0.0]
    batch = tokens([-1.0, -2.0, -1.0], advantage, reference_logp=tensor([-0.5, -3.0, -1.0]))
    loss, _ = policy_loss(logp, batch, LossRule(kl=0.3))
    loss.backward()
    assert loss.item() == pytest.approx(0.3 * (math.exp(0.5) - 1.5 + math.exp(-1)))
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([0.3 * (1 - math.exp(0.5)), 0.3 * (1 - math.exp(-1)), 0])


def test_what_is_said_about_the_tokens() -> None:
    logp, batch = leaf([-1.0, -2.0, -9.0]), tokens([-1.5, -1.0, -1.0], [1, -3, 1], [1, 1, 0])
    metrics = read_sums(policy_loss(logp, batch, rule_of("cispo", 0.0, 1.28))[1])
    up, down = math.exp(0.5), math.exp(-1)
    assert metrics == pytest.approx(
        {
            "clip_fraction": 0.5,
            "mask_fraction": 0,
            "ratio_mean": (up + down) / 2,
            "ratio_max": up,
            "kl_rollout": (up - 1.5 + down) / 2,
            "kl_rollout_k1": (-0.5 + 1) / 2,
            "kl_rollout_k2": (0.5**2 + 1) / 4,
            "entropy": 1.5,
            "negative_weight_share": 3 * down / (3 * down + 1.28),
        }
    )


def test_the_bounds_of_glm5_are_strict_and_those_of_icepop_are_not() -> None:
    x = tensor([0.8, 0.8000001, 1, 1.2799999, 1.28, 1.2800001])
    strict = Window(low=0.8, high=1.28, outside="zero")(x)
    closed = Window(low=0.8, high=1.28, outside="zero", closed=True)(x)
    assert strict.tolist() == [0, 0.8000001, 1, 1.2799999, 0, 0]
    assert closed.tolist() == [0.8, 0.8000001, 1, 1.2799999, 1.28, 0]


def test_bounds_are_compared_in_the_precision_of_the_ratio() -> None:
    assert not Window(high=1.28, outside="zero").holds(torch.tensor([1.28], dtype=torch.float32))


def test_corrections_of_the_mismatch() -> None:
    given = VECTORS["mis"]
    old, rollout, kept = tensor(given["old"]), tensor(given["mu"]), torch.ones(4, dtype=torch.bool)
    logs, one = log_ratio(old, rollout, kept), torch.zeros(4, dtype=torch.long)
    assert ratio(logs, kept, None, "token").tolist() == pytest.approx(given["ratio"])
    assert ratio(logs, kept, one, "sequence").tolist() == pytest.approx([given["seq"]] * 4)
    assert ratio(logs, kept, one, "geometric").tolist() == pytest.approx([given["geo"]] * 4)
    assert [value.mean().item() for value in divergences(logs)] == pytest.approx([given[k] for k in ("k1", "k2", "k3")])
    tis, icepop = Window(high=2.0), Window(low=0.5, high=5.0, outside="zero", closed=True)
    assert tis(logs.exp()).tolist() == pytest.approx([1.105170918, 2, 0.165298888, 1])
    assert icepop(logs.exp()).tolist() == pytest.approx([1.105170918, 2.718281828, 0, 1])


@pytest.mark.parametrize(("reward", "name"), [(1.0, "sum_loss_Rpos"), (-1.0, "sum_loss_Rneg")])
def test_ipa(reward: float, name: str) -> None:
    given = VECTORS["ipa"]
    flat = {key: [value for chunk in given[key] for value in chunk] for key in ("theta", "old", "mu")}
    chunk = torch.tensor([index for index, values in enumerate(given["mu"]) for _ in values])
    advantage = [reward * given["G"][index] for index in chunk.tolist()]
    batch = tokens(flat["mu"], advantage, segment=chunk, old_logp=tensor(flat["old"]))
    logp = leaf(flat["theta"])
    loss, _ = policy_loss(logp, batch, ipa(given["H"]))
    loss.backward()
    assert loss.item() == pytest.approx(given[name], abs=1e-9)
    moved = [1.0 if reward > 0 else min(rho, 1.0) for rho in given["rho"]]  # positives weigh 1
    coefficients = [given["m"][index] * moved[index] * reward * given["G"][index] for index in chunk.tolist()]
    assert logp.grad is not None and (-logp.grad).tolist() == pytest.approx(coefficients)


RULES = {kind: rule_of(kind, 0.8, 1.28) for kind in KINDS} | {
    "tis on recomputed": LossRule(anchor="old", correction=Window(high=2.0)),
    "masked by completion": LossRule(
        anchor="old", correction=Window(low=0.5, high=2.0, outside="zero"), correction_level="sequence"
    ),
    "kl": LossRule(kl=0.3),
    "decoupled gspo": configured(Loss(kind="decoupled_ppo", cap=1.05, floor=0.95, epochs=2, level="geometric")),
    "decoupled product": configured(Loss(kind="decoupled_ppo", epochs=2, level="sequence", correction="tis")),
    "ipa by token": configured(Loss(kind="ipa", level="token", correction="icepop")),
}


def full(count: int = 24, seed: int = 0) -> tuple[Tensor, LossTokens]:
    draw = torch.Generator().manual_seed(seed)
    noise = [0.3 * torch.randn(count, generator=draw, dtype=torch.float64) for _ in range(4)]
    logp = -torch.rand(count, generator=draw, dtype=torch.float64) * 3 - 0.1
    mask = (torch.rand(count, generator=draw) < 0.8).double()
    batch = LossTokens(
        rollout_logp=logp + noise[0],
        advantage=noise[1] * 4,
        mask=mask,
        scale=torch.rand(count, generator=draw, dtype=torch.float64),
        old_logp=logp + noise[2],
        reference_logp=logp + noise[3],
        segment=torch.arange(count) // 4,
        imitated=(1 - mask) * (torch.arange(count) % 2),
    )
    return logp.requires_grad_(), batch


def differences(logp: Tensor, batch: LossTokens, rule: LossRule, step: float = 1e-6) -> Tensor:
    """d loss / d logp by central differences. A ratio without gradient is kept constant by moving its base along."""
    base, slopes = logp.detach(), []
    for index in range(len(base)):
        shift = torch.zeros_like(base)
        shift[index] = step
        values = []
        for moved in (shift, -shift):
            offset = moved if rule.form == "score" else torch.zeros_like(moved)
            assert batch.old_logp is not None
            along = replace(batch, rollout_logp=batch.rollout_logp + offset, old_logp=batch.old_logp + offset)
            values.append(policy_loss(base + moved, along, rule)[0])
        slopes.append((values[0] - values[1]) / (2 * step))
    return torch.stack(slopes)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_the_gradient_is_that_of_finite_differences(name: str, seed: int) -> None:
    logp, batch = full(seed=seed)
    (gradient,) = torch.autograd.grad(policy_loss(logp, batch, RULES[name])[0], logp)
    torch.testing.assert_close(gradient, differences(logp, batch, RULES[name]), rtol=1e-6, atol=1e-8)


def part(batch: LossTokens, at: slice) -> LossTokens:
    fields = {name: value[at] for name, value in vars(batch).items()}
    fields["segment"] = fields["segment"] - fields["segment"].min()
    return LossTokens(**fields)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("cuts", [(24,), (8, 24), (4, 8, 12, 16, 20, 24)])
def test_loss_gradient_and_metrics_are_the_same_for_any_split(name: str, cuts: tuple[int, ...]) -> None:
    logp, batch = full()
    whole, sums = policy_loss(logp, batch, RULES[name])
    (gradient,) = torch.autograd.grad(whole, logp)
    pieces = [slice(start, end) for start, end in zip((0, *cuts[:-1]), cuts, strict=True)]
    parts = [policy_loss(logp[piece], part(batch, piece), RULES[name]) for piece in pieces]
    total = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(torch.autograd.grad(total, logp)[0], gradient, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(torch.stack([one.sums for _, one in parts]).sum(0), sums.sums)


@pytest.mark.parametrize("name", RULES)
def test_masked_entries_may_hold_anything(name: str) -> None:
    logp, batch = full()
    clean = policy_loss(logp, batch, RULES[name])[0]
    (expected,) = torch.autograd.grad(clean, logp)
    gone = batch.mask == 0
    assert batch.imitated is not None
    lost = gone & (batch.imitated == 0)
    assert lost.any() and batch.old_logp is not None and batch.reference_logp is not None and batch.scale is not None
    filled = replace(
        batch,
        rollout_logp=batch.rollout_logp.masked_fill(gone, -math.inf),
        old_logp=batch.old_logp.masked_fill(gone, math.nan),
        reference_logp=batch.reference_logp.masked_fill(gone, -math.inf),
        advantage=batch.advantage.masked_fill(gone, math.nan),
        scale=batch.scale.masked_fill(lost, math.inf),
    )
    loss, sums = policy_loss(logp, filled, RULES[name])
    (gradient,) = torch.autograd.grad(loss, logp)
    assert torch.equal(loss, clean) and torch.equal(gradient, expected)
    assert all(math.isfinite(value) for value in read_sums(sums).values())


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("masked", [0, 5])
def test_an_empty_or_all_masked_micro_batch_is_zero_with_a_gradient(name: str, masked: int) -> None:
    logp, batch = full(masked)
    loss, sums = policy_loss(logp, replace(batch, mask=torch.zeros(masked), imitated=None), RULES[name])
    loss.backward()
    assert loss.item() == 0 and read_sums(sums)["ratio_mean"] == 0
    assert logp.grad is not None and not logp.grad.any()


@pytest.mark.parametrize("name", RULES)
def test_absurd_ratios_stay_finite(name: str) -> None:
    logp = leaf([-1.0, -1000.0])
    far = tensor([-1000.0, -1.0])
    batch = tokens(far.tolist(), [1, -1], old_logp=far, reference_logp=far, segment=torch.tensor([0, 1]))
    loss, sums = policy_loss(logp, batch, RULES[name])
    loss.backward()
    assert math.isfinite(loss.item()) and math.isfinite(read_sums(sums)["kl_rollout"])
    assert logp.grad is not None and logp.grad.isfinite().all()


def test_on_policy_every_ratio_is_one() -> None:
    logp = leaf([-1.0, -2.0])
    _, sums = policy_loss(logp, tokens([-1.0, -2.0], [1, -3]), rule_of("cispo", 0.0, 5.0))
    metrics = read_sums(sums)
    assert (metrics["ratio_mean"], metrics["ratio_max"], metrics["clip_fraction"], metrics["kl_rollout"]) == (
        1,
        1,
        0,
        0,
    )
    assert metrics["negative_weight_share"] == 0.75


def test_a_rule_corrects_the_mismatch_exactly_once() -> None:
    with pytest.raises(ValueError, match="already corrects the mismatch"):
        LossRule(anchor="rollout", correction=Window(high=2.0))
    with pytest.raises(ValueError, match="leaves old / rollout uncorrected"):
        LossRule(anchor="old")


def test_missing_logprobs_and_segments_are_told() -> None:
    logp, batch = leaf([-1.0]), tokens([-1.0], [1.0])
    for rule, what in (
        (decoupled_ppo(0.8, 1.2), "old logprobs"),
        (LossRule(kl=0.1), "reference logprobs"),
        (rule_of("gspo", 0.8, 1.2), "segment"),
    ):
        with pytest.raises(ValueError, match=what):
            policy_loss(logp, batch, rule)


def test_branches_of_a_tree_add_their_coefficients() -> None:
    given = VECTORS["tree"]
    names = list(given["edge_logp"])
    edges = leaf(list(given["edge_logp"].values()))
    branches = list(zip(given["mu"], given["mask"], given["adv"], strict=True))
    flat = [(names.index(edge), mu[edge], mask[edge], adv) for mu, mask, adv in branches for edge in mu]
    where, rollout, mask, advantage = zip(*flat, strict=True)
    loss, sums = policy_loss(
        edges[list(where)], tokens(list(rollout), list(advantage), list(mask)), rule_of("cispo", 0.0, given["cap"])
    )
    loss.backward()
    assert loss.item() == pytest.approx(given["sum_loss"]) and sums.sums[0] == 7
    assert edges.grad is not None and (-edges.grad).tolist() == pytest.approx([given["coef"][name] for name in names])


def test_imitation_is_the_scaled_likelihood() -> None:
    logp, batch = full()
    assert batch.scale is not None
    loss, _ = imitation(logp, batch)
    assert loss.item() == pytest.approx(-(batch.scale * batch.mask * logp).sum().item())


@pytest.mark.parametrize("name", RULES)
def test_imitation_beside_a_policy_loss_adds_its_likelihood_and_changes_nothing_else(name: str) -> None:
    logp, batch = full()
    assert batch.scale is not None and batch.imitated is not None and batch.imitated.sum() >= 2
    alone, sums = policy_loss(logp, replace(batch, imitated=None), RULES[name])
    mixed, more = policy_loss(logp, batch, RULES[name])
    copied = batch.imitated > 0
    assert (mixed - alone).item() == pytest.approx(-(batch.scale * logp)[copied].sum().item())
    expected = {"imitated_tokens": int(copied.sum()), "imitation_loss": pytest.approx(-logp[copied].mean().item())}
    assert read_sums(more) == read_sums(sums) | expected
