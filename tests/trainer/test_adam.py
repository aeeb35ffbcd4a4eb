"""The optimizer's operation: its numbers, and the memory that it takes beside parameters, gradients and moments."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.config.optimizer import SMALLEST_EPS
from trainer.megatron.adam import Adam, install
from trainer.megatron.parallel import Ranks

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-15, "weight_decay": 0.1}


def parameters() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, 50, generator=draw).requires_grad_() for size in (3, 40, 1)]


def draw_gradients(params: list[Tensor], seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    for param in params:
        param.grad = torch.randn(param.shape, generator=draw) * 1e-3


@pytest.mark.parametrize("decoupled", [True, False])
def test_three_steps_are_those_of_torch(decoupled: bool) -> None:
    ours, theirs = parameters(), parameters()
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    pairs = [(ours, Adam(ours, adam_w_mode=decoupled, **OPTIONS)), (theirs, kind(theirs, foreach=False, **OPTIONS))]
    for params, optimizer in pairs:
        for seed in range(3):
            draw_gradients(params, seed)
            optimizer.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_the_smallest_epsilon_keeps_steps_near_the_rate_where_squares_of_gradients_are_zero() -> None:
    """A gradient that was always 0 is 0 / eps, and one below 1e-22 is divided by eps alone."""
    gradients = [0.0, *(10.0**power for power in range(-45, 1))]
    param = torch.ones(len(gradients)).requires_grad_()
    param.grad = torch.tensor(gradients)
    Adam([param], lr=1e-2, eps=SMALLEST_EPS).step()
    moved = 1 - param.detach()
    assert moved[0] == 0 and moved.min() >= 0 and moved.max() < 1.5e-2
    assert (param.grad[1:] ** 2 == 0).any() and moved[-1] == pytest.approx(1e-2, rel=1e-4)


class NewNumbers(TorchDispatchMode):
    """The numbers in new tensors that operations return."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        results = func(*args, **(kwargs or {}))
        new = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor) and leaf.data_ptr() not in given]
        self.numbers += sum(leaf.numel() for leaf in new)
        return results


def test_a_step_makes_no_temporaries() -> None:
    params = parameters()
    optimizer = Adam(params, **OPTIONS)
    draw_gradients(params, 0)
    optimizer.step()
    with NewNumbers() as new:
        optimizer.step()
    assert new.numbers <= 2


def test_the_norm_and_the_clipping_of_gradients_read_nothing_back(ranks: Ranks) -> None:
    install()
    from megatron.core.optimizer import clip_grads

    grads = [param.detach() for param in parameters()]
    expected = torch.cat([grad.flatten() for grad in grads]).norm()
    (norm,) = clip_grads.l2_norm_impl(0, None, [grads], False)[0]
    torch.testing.assert_close(norm, expected)
    clip_grads.multi_tensor_scale_impl(0, None, [grads, grads], 0.5)
    clip_grads.multi_tensor_scale_impl(0, None, [[], []], 0.5)
    torch.testing.assert_close(torch.cat([grad.flatten() for grad in grads]).norm(), expected / 2)
    unreadable = [grad.to("meta") for grad in grads]
    assert clip_grads.l2_norm_impl(0, None, [unreadable], False)[0].device.type == "meta"
