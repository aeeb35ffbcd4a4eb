"""Passes over micro-batches by Megatron's schedules: one after the other, or 1F1B through the stages of a pipeline.

Every stage is given every micro-batch (positions and layout are needed in all of them) and gets the hidden states of
the stage before; losses and logprobs exist on the last one. Micro-batches may differ in length: their shapes are sent
ahead. Left out: stages of several stretches of layers (interleaving).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from trainer.data.micro_batch import MicroBatch
from trainer.megatron.model.model import PolicyModel

Found = TypeVar("Found")
Micros = Iterator[tuple[int, MicroBatch]]


def forward_backward(
    ddp: DistributedDataParallel, micros: Sequence[MicroBatch], loss_of: Callable[[int, Tensor], tuple[Tensor, Found]]
) -> list[Found]:
    """Add up the gradients of all micro-batches. They are not yet summed over ranks.

    `loss_of(number, logp)` is called on the last stage with each micro-batch's number and the logprobs of its labels;
    it returns the loss and what is to be kept of it. Returns what was kept: nothing on the other stages.
    """

    def step(left: Micros, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Found]]]:
        number, packed = next(left)
        return model(packed), partial(_counted, loss_of, number)

    return _run(step, ddp, micros, forward_only=False)


def _counted(
    loss_of: Callable[[int, Tensor], tuple[Tensor, Found]], number: int, logp: Tensor
) -> tuple[Tensor, Tensor, Found]:
    """A loss as Megatron takes it without dividing it: with a count of tokens, which nothing here reads."""
    loss, kept = loss_of(number, logp)
    return loss, torch.zeros((), dtype=torch.int), kept


@torch.no_grad()
def forward(
    model: PolicyModel, micros: Sequence[MicroBatch], compute: Callable[[MicroBatch], Tensor] | None = None
) -> list[Tensor]:
    """What the model (or `compute`, another method of it) gives for each micro-batch, on the last stage alone.

    Without gradients.
    """

    def step(left: Micros, model: Any) -> tuple[Tensor, None]:
        _, packed = next(left)
        return (compute or model)(packed), None

    found: list[Tensor] = _run(step, model, micros, forward_only=True)
    return found


def _run(step: Callable[..., Any], model: Any, micros: Sequence[MicroBatch], *, forward_only: bool) -> list[Any]:
    run = get_forward_backward_func()
    kept: list[Any] = run(
        forward_step_func=step,
        data_iterator=iter(enumerate(micros)),
        model=model,
        num_microbatches=len(micros),
        seq_length=0,  # unused: the shapes are sent
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return kept
