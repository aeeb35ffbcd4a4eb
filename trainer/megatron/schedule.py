"""Forward and backward passes over micro-batches, by Megatron's schedules.

Without a pipeline, micro-batches run one after the other. With one, its stages work on different micro-batches at the
same time (1F1B: each stage alternates one forward and one backward pass). Every stage is given every micro-batch, as
all of them need positions and layout; a stage gets its hidden states from the stage before it. Losses and logprobs
exist on the last stage only. Micro-batches may differ in length: stages send the shapes first.
Left out: interleaved stages (several stretches of layers per stage).
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

Kept = TypeVar("Kept")
Micros = Iterator[tuple[int, MicroBatch]]


def forward_backward(
    ddp: DistributedDataParallel, micros: Sequence[MicroBatch], loss_of: Callable[[int, Tensor], tuple[Tensor, Kept]]
) -> list[Kept]:
    """Add up the gradients of all micro-batches on this rank. They are not yet summed over ranks (`sum_gradients`).

    `loss_of(number, logp)` is called on the last stage, with a micro-batch's number and the logprobs of its labels; it
    returns the loss and a value to keep. Returns the kept values in order; an empty list on other stages.
    """

    def step(left: Micros, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Kept]]]:
        number, packed = next(left)
        return model(packed), partial(_counted, loss_of, number)

    return _run(step, ddp, micros, forward_only=False)


def _counted(
    loss_of: Callable[[int, Tensor], tuple[Tensor, Kept]], number: int, logp: Tensor
) -> tuple[Tensor, Tensor, Kept]:
    """Call `loss_of`, and return three values: the loss, a number of tokens, and what is to be kept.

    With three values and `calculate_per_token_loss`, megatron-core 0.16.1 does not divide the loss by the number of
    micro-batches. Nothing reads the number of tokens.
    """
    loss, kept = loss_of(number, logp)
    return loss, torch.zeros((), dtype=torch.int), kept


@torch.no_grad()
def forward(
    model: PolicyModel, micros: Sequence[MicroBatch], compute: Callable[[MicroBatch], Tensor] | None = None
) -> list[Tensor]:
    """Run the model (or `compute`, another method of it) over the micro-batches without gradients.

    Returns one tensor for each micro-batch; an empty list on all stages but the last.
    """

    def step(left: Micros, model: Any) -> tuple[Tensor, None]:
        _, packed = next(left)
        return (compute or model)(packed), None

    outputs: list[Tensor] = _run(step, model, micros, forward_only=True)
    return outputs


def _run(step: Callable[..., Any], model: Any, micros: Sequence[MicroBatch], *, forward_only: bool) -> list[Any]:
    run = get_forward_backward_func()
    outputs: list[Any] = run(
        forward_step_func=step,
        data_iterator=iter(enumerate(micros)),
        model=model,
        num_microbatches=len(micros),
        seq_length=0,  # unused, as stages send their shapes (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
    )
    return outputs
