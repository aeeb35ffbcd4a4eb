"""Megatron's DDP and optimizer around a model, and the learning rate of a step."""

import math
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import MegatronModule

from trainer import config as settings
from trainer.megatron import adam


def wrap(model: MegatronModule, parallel: settings.Parallel) -> DistributedDataParallel:
    """The model with fp32 gradient buffers that are summed over the data-parallel ranks."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=parallel.distributed_optimizer,
    )
    return DistributedDataParallel(model.config, ddp, model)


def build_optimizer(
    ddp: DistributedDataParallel, options: settings.Optimizer, parallel: settings.Parallel
) -> MegatronOptimizer:
    """Adam with decoupled weight decay, fp32 main weights and global gradient clipping."""
    adam.install()
    dtype = ddp.config.params_dtype
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            clip_grad=options.clip,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=parallel.distributed_optimizer,
        ),
        [ddp],
    )
    _make_moments(optimizer)
    return optimizer


def _make_moments(optimizer: MegatronOptimizer) -> None:
    """Adam makes its state at the first step; here it exists before, so that step 0 can be saved like any other."""
    for inner in (part.optimizer for part in parts(optimizer)):
        for param in (param for group in inner.param_groups for param in group["params"]):
            for name in ("exp_avg", "exp_avg_sq"):
                inner.state[param].setdefault(name, torch.zeros_like(param, dtype=torch.float32))


def parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """The optimizers that Megatron chains: of parameters that are divided in different ways."""
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def sum_gradients(ddp: DistributedDataParallel) -> None:
    """Sum the gradients over the ranks that share the parameters."""
    finalize_model_grads([ddp])


def learning_rate(options: settings.Optimizer, step: int, steps: int) -> float:
    """The rate of a step (counted from 1) of `steps`: linear warm-up, then as `decay` says down to `min_lr`."""
    if step <= options.warmup_steps:
        return options.lr * step / options.warmup_steps
    past = min(1.0, (step - options.warmup_steps) / max(1, steps - options.warmup_steps))
    share = {"constant": 1.0, "linear": 1 - past, "cosine": (1 + math.cos(math.pi * past)) / 2}[options.decay]
    return options.min_lr + (options.lr - options.min_lr) * share


def set_learning_rate(optimizer: MegatronOptimizer, rate: float) -> None:
    groups: list[dict[str, Any]] = optimizer.param_groups
    for group in groups:
        group["lr"] = rate
