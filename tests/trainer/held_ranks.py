"""What a policy holds on each of two ranks: `torchrun --nproc-per-node 2 -m tests.trainer.held_ranks DIRECTORY`.

For each of SPLITS: the bytes of both ranks, as JSON.
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from tests.trainer.make import make_config, write_model
from trainer.doctor.memory import Held
from trainer.megatron.optimizer import parts
from trainer.megatron.parallel import job, split
from trainer.policy import Policy

SPLITS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("qwen3", {"tensor": 2}),
    "tensor-bf16": ("qwen2", {"tensor": 2, "precision": "bfloat16"}),
    "pipeline": ("qwen3", {"pipeline": 2}),
    "pipeline-tied": ("qwen2", {"pipeline": 2}),
    "pipeline-mixed": ("qwen3_moe_mixed", {"pipeline": 2}),
    "expert": ("qwen3_moe", {"expert": 2}),
    "tensor-expert": ("qwen3_moe", {"tensor": 2}),
    "distributed": ("qwen3", {"distributed_optimizer": True, "precision": "bfloat16"}),
    "distributed-expert": ("qwen3_moe", {"distributed_optimizer": True, "expert": 2}),
}
"""The family and the section [parallel] of each case."""


def measured(policy: Policy) -> Held:
    """What a policy really holds on this rank."""
    models = [policy.model, *([policy.drafter.head] if policy.drafter else [])]
    optimizers = [policy.optimizer, *([policy.drafter.optimizer] if policy.drafter else [])]
    weights = [param for model in models for param in model.parameters()]
    own = {param.data_ptr() for param in weights}
    updated = [
        (inner.optimizer, param)
        for optimizer in optimizers
        for inner in parts(optimizer)
        for group in inner.optimizer.param_groups
        for param in group["params"]
    ]
    moments = [value for optimizer, param in updated for value in optimizer.state[param].values()]
    main = [param for _, param in updated if param.data_ptr() not in own]
    reference = [] if policy.reference is None else list(policy.reference.parameters())
    gradients = [vars(param)["main_grad"] for param in weights]
    return Held(size(weights), size(gradients), size([*moments, *main]), size(reference))


def size(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def main(directory: Path) -> None:
    """Build a policy for each split and write what both ranks hold."""
    with job() as device:
        for name, (family, parallel) in SPLITS.items():
            model = directory / name / "model"
            if dist.get_rank() == 0:
                write_model(model, family)
            dist.barrier()
            config = make_config(model.parent, parallel={"processes": 2, **parallel})
            with split(config.parallel, device) as ranks:
                both: list[Any] = [None, None]
                dist.all_gather_object(both, measured(Policy(model, config, ranks)))
            (directory / f"{name}.json").write_bytes(msgspec.json.encode(both))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
