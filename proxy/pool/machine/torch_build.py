"""What the installed torch was built for, and what it sees. Imports torch, so it is for a process of its own."""

from typing import Any

import msgspec


class TorchBuild(msgspec.Struct, frozen=True, kw_only=True):
    """The installed torch."""

    version: str = ""
    """Empty: not installed, or it cannot be imported."""
    cuda: str = ""
    """The CUDA version it was built for; empty for a CPU build."""
    archs: tuple[str, ...] = ()
    """GPU architectures that it holds code for, such as sm_90."""
    nccl: str = ""
    devices: int = 0
    """CUDA devices that it sees."""
    error: str = ""
    """Why it could not be imported."""

    def described(self) -> str:
        """One line for people."""
        if not self.version:
            return f"cannot be imported: {self.error}"
        built = f"for CUDA {self.cuda} ({' '.join(self.archs) or 'no GPU seen'})" if self.cuda else "for CPUs only"
        return f"{self.version}, built {built}"


def read_torch() -> TorchBuild:
    """Import torch and ask it."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a library that it loads is missing
        return TorchBuild(error=" ".join(str(error).split()))
    nccl: Any = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
    return TorchBuild(
        version=str(torch.__version__),
        cuda=torch.version.cuda or "",
        archs=tuple(torch.cuda.get_arch_list()),
        nccl=".".join(map(str, nccl)),
        devices=torch.cuda.device_count(),
    )
