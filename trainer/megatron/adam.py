"""AdamW by torch's fused operation, with the state layout of FusedAdam in apex and Transformer Engine.

megatron-core 0.16.1 can load a checkpoint of its distributed optimizer only in that layout: `step` is an integer of the
parameter group, and each parameter has `exp_avg` and `exp_avg_sq`. With torch's own AdamW it saves, but the load fails
(`assert len(steps) == 1`, KeyError: 'step'). So this class stands in wherever neither library is installed.
Left out: amsgrad, capturable steps; parameters of several dtypes or devices.
"""

from collections.abc import Iterable
from typing import Any

import torch


class Adam(torch.optim.Optimizer):
    """m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; p = (1 - lr wd) p - lr m^ / (sqrt(v^) + eps).

    m^ and v^ are m / (1 - b1^step) and v / (1 - b2^step). Moments have the parameter's shape and dtype.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), **options: Any
    ):
        scalars = {"eps": options.get("eps", 1e-8), "weight_decay": options.get("weight_decay", 0.0)}
        super().__init__(params, {"lr": lr, "betas": betas, "bias_correction": True, **scalars})
        self.decoupled = options.get("adam_w_mode", True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # Megatron passes no closure
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[torch.Tensor]) -> None:
        """One fused operation: temporaries would take as much memory as all parameters."""
        fused = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        steps = torch.full((), group["step"], dtype=torch.float32, device=params[0].device)
        fused(
            params,
            [param.grad for param in params if param.grad is not None],
            *self._moments(params),
            [],
            [steps] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def _moments(self, params: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        for param in params:
            if not self.state[param]:
                self.state[param] = {"exp_avg": torch.zeros_like(param), "exp_avg_sq": torch.zeros_like(param)}
        return [self.state[p]["exp_avg"] for p in params], [self.state[p]["exp_avg_sq"] for p in params]


def norm_of_all(_chunk: int, _flags: Any, lists: list[list[torch.Tensor]], *_: Any) -> tuple[torch.Tensor, None]:
    """[1] the norm of all numbers of the first list. The arguments are those of apex's `multi_tensor_l2norm`.

    megatron-core 0.16.1's own form without apex reads one number back from the GPU for every tensor.
    """
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).view(1), None


def scale_all(_chunk: int, _flags: Any, lists: list[list[torch.Tensor]], factor: float) -> None:
    """Multiply all numbers of the first list in place. The arguments are those of apex's `multi_tensor_scale`."""
    if lists[0]:  # a rank may have no gradients of its own
        torch._foreach_mul_(lists[0], factor)


def install() -> str:
    """Make Megatron use this class and these functions where it found neither Transformer Engine nor apex.

    Returns the name of the module whose Adam it uses then.
    megatron-core 0.16.1 decides at import which it uses and keeps the decision in these module variables.
    """
    import megatron.core.optimizer as optimizer  # importable only after install_cpu_port()
    import megatron.core.optimizer.distrib_optimizer as distributed
    from megatron.core.optimizer import clip_grads

    if optimizer.USING_PYTORCH_OPTIMIZER:
        optimizer.Adam = distributed.Adam = Adam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        distributed.HAVE_APEX_OR_TE = distributed.USING_APEX_OPTIMIZER = True
        vars(clip_grads).update(l2_norm_impl=norm_of_all, multi_tensor_scale_impl=scale_all)
    return str(optimizer.Adam.__module__)
