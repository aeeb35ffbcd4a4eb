"""Megatron's data-parallel wrapper (DDP) and optimizer for a model, and the learning rate of each step."""

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import MegatronModule

from trainer import config as settings
from trainer.megatron import adam


def wrap(model: MegatronModule, parallel: settings.Parallel) -> DistributedDataParallel:
    """Wrap the model in Megatron's DDP: fp32 gradient buffers, summed over the data-parallel ranks.

    The sum runs after the last micro-batch, not overlapped with the backward pass, on every device. It is one sum per
    update, which has many micro-batches. To overlap it, megatron-core 0.16.1 needs `no_sync` around all micro-batches
    but the last, and every parameter's gradient as often in each update as in the first ("Communication call has not
    been issued"): empty micro-batches and experts without tokens have never been tried against that on a GPU.
    """
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=parallel.distributed_optimizer,
    )
    return DistributedDataParallel(model.config, ddp, model)


def build_optimizer(
    ddp: DistributedDataParallel, options: settings.Optimizer, parallel: settings.Parallel
) -> MegatronOptimizer:
    """AdamW with decoupled weight decay of matrices, fp32 main weights and global gradient clipping.

    With `parallel.distributed_optimizer`, each data-parallel rank keeps and updates one part of the optimizer's state.
    """
    adam.install()
    dtype = ddp.config.params_dtype
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.BETAS[0],
            adam_beta2=options.BETAS[1],
            adam_eps=options.eps,
            clip_grad=options.clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=parallel.distributed_optimizer,
        ),
        [ddp],
    )
    for group in optimizer.param_groups:
        # 0 for norms and biases. Only the scheduler of megatron-core 0.16.1 applies it, which we do not use.
        group["weight_decay"] *= group["wd_mult"]
    # Adam creates its moments in its first step. Create them now, so that step 0 can be saved like any other.
    for inner in (part.optimizer for part in parts(optimizer)):
        for param in (param for group in inner.param_groups for param in group["params"]):
            for name in ("exp_avg", "exp_avg_sq"):
                inner.state[param].setdefault(name, torch.zeros_like(param, dtype=torch.float32))
    return optimizer


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that Megatron chains: one for each way in which parameters are split over ranks."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def load_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Restore the optimizer's state. The settings stay those that it was built with.

    A checkpoint holds the settings of the run that saved it, and the user may have changed them since.
    """
    own = [{name: group[name] for name in ("betas", "eps", "weight_decay")} for group in optimizer.param_groups]
    optimizer.load_state_dict(state)
    for group, settings_of_group in zip(optimizer.param_groups, own, strict=True):
        group.update(settings_of_group)


def sum_gradients(ddp: DistributedDataParallel) -> None:
    """Sum the gradients over the ranks that share parameters: data ranks, tied embeddings, sequence-parallel norms."""
    finalize_model_grads([ddp])


def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Return the norm of the summed gradients before clipping, NaN where Megatron's own check fails. Collective."""
    if optimizer.prepare_grads():
        return math.nan
    return float(optimizer.get_grad_norm())


def learning_rate(options: settings.Optimizer, step: int, steps: int) -> float:
    """The learning rate of a step (counted from 1) out of `steps`.

    Rises linearly to `lr` over `warmup_steps`, then falls along the curve that `decay` names. It reaches `min_lr` one
    step after the last one, which would learn nothing at a rate of 0.
    """
    if step <= options.warmup_steps:
        return options.lr * step / options.warmup_steps
    progress = min(1.0, (step - options.warmup_steps) / max(1, steps + 1 - options.warmup_steps))
    remaining = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[
        options.decay
    ]
    return options.min_lr + (options.lr - options.min_lr) * remaining


def set_learning_rate(optimizer: MegatronOptimizer, rate: float) -> None:
    """Set the rate of the next step for all parameters."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    for group in groups:
        group["lr"] = rate
