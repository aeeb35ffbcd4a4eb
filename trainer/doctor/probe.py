"""Asks the trainer what it would use here: `python -m trainer.doctor.probe PRECISION HEAD_DIM RANKS`.

RANKS are those of this machine. It imports torch and Megatron, so it runs in a process of its own. It prints one JSON
object.
"""

import sys

import msgspec

from proxy.pool.errors import UserError
from proxy.pool.machine.torch_build import TorchBuild, read_torch

NAMES = {
    "trainer.megatron.attention.kernels": "slices of torch's CPU flash attention",
    "trainer.megatron.attention.flex": "FlexAttention",
    "trainer.megatron.attention.magi": "MagiAttention",
    "trainer.megatron.adam": "torch's fused AdamW",
}
"""What people call the modules whose code is chosen."""


class TrainerProbe(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer's own code chose."""

    torch: TorchBuild = TorchBuild()
    device: str = ""
    backend: str = ""
    """Backend of the collectives."""
    attention: str = ""
    layers: str = ""
    optimizer: str = ""
    too_many: str = ""
    """Why so many ranks cannot run here."""
    magi: bool = False
    """Whether MagiAttention is installed."""
    error: str = ""
    """Why there is no answer."""


def probe(precision: str, head_dim: int, ranks: int) -> TrainerProbe:
    """Ask each part of trainer/megatron for its choice, for a model with such heads and so many ranks here."""
    build = read_torch()
    if not build.version:
        return TrainerProbe(torch=build, error=build.error)
    import torch

    from trainer.megatron import adam
    from trainer.megatron.attention import magi
    from trainer.megatron.attention.kernels import kernel_for
    from trainer.megatron.device import choose_device, demand_gpu
    from trainer.megatron.model import transformer_engine
    from trainer.policy import DTYPES

    device = choose_device(0)
    too_many = ""
    if device.torch_device.type == "cuda":
        try:
            demand_gpu(ranks - 1, build.devices)
        except UserError as error:
            too_many = str(error)
    query = torch.empty(1, 1, 1, head_dim, dtype=DTYPES[precision], device=device.torch_device)
    return TrainerProbe(
        torch=build,
        device=device.torch_device.type,
        backend=device.backend,
        attention=_name(kernel_for(query).__module__),
        layers="Transformer Engine's" if transformer_engine.available() else "Megatron's plain ones",
        optimizer=_name(adam.install()),
        too_many=too_many,
        magi=magi.installed(),
    )


def _name(module: str) -> str:
    return NAMES.get(module, module.split(".")[0])


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(probe(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))).decode() + "\n")
