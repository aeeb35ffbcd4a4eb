"""The policy losses that a configuration can name, each as a `LossRule`.

Bounds are the absolute values that a ratio is clipped to, never epsilons: codebases disagree on whether `epsilon_high`
is the bound or is added to 1.
"""

from dataclasses import replace
from functools import partial

from trainer.config import KINDS, Correction, Loss
from trainer.loss.policy_loss import LossRule
from trainer.loss.ratios import Window


def configured(loss: Loss) -> LossRule:
    """The rule that a configuration names, with its KL coefficient."""
    rule = replace(rule_of(loss.kind, *loss.bounds, loss.mismatch), kl=loss.kl)
    if loss.level is not None:
        rule = replace(rule, level=loss.level, correction_level=loss.level)
    if loss.correction is not None:
        bound = loss.bounds[1] if loss.kind == "ipa" else loss.mismatch
        rule = replace(rule, correction=correction(loss.correction, bound))
    return rule


def correction(kind: Correction, bound: float) -> Window:
    """What a token weighs by old / rollout, up to a bound (`Loss.correction`)."""
    closed = partial(Window, high=bound, outside="zero", closed=True)
    windows = {
        "reject": closed(),
        "mask": closed(low=-1.0, inside="one"),
        "tis": Window(high=bound),
        "icepop": closed(low=1 / bound),
    }
    return windows[kind]


def rule_of(kind: str, low: float, high: float, mismatch: float = 5.0) -> LossRule:
    """The rule of a named loss with these bounds. `mismatch`: see decoupled_ppo. ValueError for an unknown name.

    Ratios are against the rollout's logprobs, unless the loss has its own correction (decoupled_ppo, ipa).

    - cispo: MiniMax-M1 (arXiv 2506.13585), equations 4-5; cispo_unified: equations 6-7.
    - glm5: arXiv 2602.15763, equations 3-5. icepop: arXiv 2510.18855. tis: min(r, high).
    - gspo: arXiv 2507.18071, the surrogate of a whole completion's ratio, which is a geometric mean. Its bounds there
      are 1 - 3e-4 and 1 + 4e-4, and its mean is norm = rollout. cispo_completion: CISPO's clipped weight with that
      ratio.
    - ppo: the surrogate against the rollout, which is AReaL's decoupled one where both policies are the same.
    - dppo_tv: prime-rl's default.
    """
    closed, strict = Window(low=low, high=high), Window(low=low, high=high, outside="zero")
    rules = {
        "cispo": LossRule(window=closed),
        "cispo_unified": LossRule(window=closed, unified=True),
        "glm5": LossRule(window=strict),
        "icepop": LossRule(window=Window(low=low, high=high, outside="zero", closed=True)),
        "tis": LossRule(window=Window(high=high)),
        "cispo_completion": LossRule(window=closed, level="geometric"),
        "gspo": LossRule(form="surrogate", window=closed, level="geometric"),
        "ppo": LossRule(form="surrogate", window=closed),
        "decoupled_ppo": decoupled_ppo(low, high, mismatch),
        "ipa": ipa(high),
        "dppo_tv": LossRule(form="variation", window=Window(high=high), penalty=1e-3),
    }
    if kind not in rules:
        raise ValueError(f"{kind} is no loss; choose from {', '.join(KINDS)}")
    return rules[kind]


def decoupled_ppo(low: float, high: float, mismatch: float = 5.0) -> LossRule:
    """AReaL (arXiv 2505.24298), equation 5: (old / rollout) min(u A, clip(u, low, high) A), u = policy / old.

    Tokens whose old / rollout exceeds `mismatch` are masked, as AReaL's code does at 5 (`behav_imp_weight_cap`). In
    the first update of a batch u is 1, so nothing else would bound their weight.
    """
    window = Window(low=low, high=high)
    return LossRule(form="surrogate", window=window, anchor="old", correction=correction("reject", mismatch))


def ipa(mismatch: float) -> LossRule:
    """ROLL's chunk-level loss (arXiv 2512.24873, equations 8-9), with a completion as a chunk.

    Tokens of positive advantage weigh 1; those of negative advantage weigh [policy / old] clipped to [0, 1]. Ratios are
    geometric means over the chunk. Chunks whose mean old / rollout exceeds `mismatch` are masked. Advantages are the
    chunks' discounted returns (equation 7), with `credit.gamma`: of the rollout's group-relative advantage or, with
    `credit.baseline` = none, of its reward.
    """
    return LossRule(
        window=Window(high=1.0),
        level="geometric",
        anchor="old",
        correction=correction("mask", mismatch),
        correction_level="geometric",
        only_negatives=True,
    )
