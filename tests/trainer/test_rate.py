"""The learning rate of a step."""

import pytest

from trainer.config import Optimizer
from trainer.megatron.optimizer import learning_rate


def test_the_learning_rate_warms_up_and_falls() -> None:
    decays = (Optimizer(lr=1.0, warmup_steps=2, min_lr=0.1, decay=decay) for decay in ("constant", "linear", "cosine"))
    constant, linear, cosine = ([learning_rate(rate, step, 10) for step in (1, 2, 4, 6, 10, 12)] for rate in decays)
    assert constant == [0.5, 1, 1, 1, 1, 1]
    assert linear == pytest.approx([0.5, 1, 0.775, 0.55, 0.1, 0.1])
    assert cosine == pytest.approx([0.5, 1, 0.8681981, 0.55, 0.1, 0.1])


def test_without_a_warm_up_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(Optimizer(lr=0.5), 1, 10) == 0.5
