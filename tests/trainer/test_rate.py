"""The learning rate of a step."""

import msgspec
import pytest
from msgspec.structs import replace

from trainer.config import Optimizer
from trainer.megatron.optimizer import learning_rate


def test_the_learning_rate_warms_up_and_falls() -> None:
    steady = Optimizer(lr=1.0, warmup_steps=2)
    rates = [steady, *(replace(steady, min_lr=0.1, decay=decay) for decay in ("linear", "cosine"))]
    constant, linear, cosine = ([learning_rate(rate, step, 10) for step in (1, 2, 5, 8, 10, 11, 12)] for rate in rates)
    assert constant == [0.5, 1, 1, 1, 1, 1, 1]
    assert linear == pytest.approx([0.5, 1, 0.7, 0.4, 0.2, 0.1, 0.1])  # the last step is the tenth
    assert cosine == pytest.approx([0.5, 1, 0.775, 0.325, 0.1271383, 0.1, 0.1])


@pytest.mark.parametrize("decay", ["linear", "cosine"])
@pytest.mark.parametrize("steps", [1, 2, 10])
def test_the_last_step_learns_where_the_rate_falls_to_zero(decay: str, steps: int) -> None:
    for warmup in {0, 1, steps}:
        options = msgspec.convert({"lr": 1.0, "decay": decay, "warmup_steps": warmup}, Optimizer)
        assert learning_rate(options, steps, steps) > 0 == learning_rate(options, steps + 1, steps)


def test_without_a_warm_up_the_first_step_has_the_full_rate() -> None:
    assert learning_rate(Optimizer(lr=0.5), 1, 10) == 0.5
