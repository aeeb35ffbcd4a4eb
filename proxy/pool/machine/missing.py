"""Which parts that engine and trainer both need are missing, and the commands that bring them."""

from collections.abc import Iterator

from proxy.pool.machine.facts import Machine
from proxy.pool.machine.report import Missing
from proxy.pool.machine.torch_build import TorchBuild

INSTALL_GPU = "make install-gpu"
DRIVER = "apt-get install nvidia-driver-580-server    # or newer; then restart the machine"


def install_command(machine: Machine) -> str:
    """The command that installs everything for this machine."""
    return INSTALL_GPU if machine.gpus else "make install"


def missing_torch(machine: Machine, torch: TorchBuild) -> Iterator[Missing]:
    """What is missing of torch, and of what it needs to run on this machine's GPUs."""
    if not torch.version:
        yield Missing("torch", f"no engine and no trainer runs here ({torch.error})", install_command(machine))
    if machine.gpu_error:
        lost = f"whether this machine has GPUs is not known, and none is used ({machine.gpu_error})"
        yield Missing("an answer of nvidia-smi", lost, "nvidia-smi    # repair the driver until this lists the GPUs")
    if not machine.gpus:
        return
    if torch.version and not torch.cuda:
        yield Missing("torch for CUDA", f"torch {torch.version} is a CPU build and sees no GPU", INSTALL_GPU)
    elif machine.driver_cuda and torch.cuda and _major(machine.driver_cuda) < _major(torch.cuda):
        lost = f"the driver runs CUDA {machine.driver_cuda} at most, and torch is built for {torch.cuda}"
        yield Missing("a newer driver", lost, DRIVER)
    elif torch.cuda and torch.devices == 0:
        yield Missing("CUDA devices", "torch sees none of the GPUs", "unset CUDA_VISIBLE_DEVICES; nvidia-smi")
    if not machine.compiler:
        lost = "Triton and nvcc cannot start, so neither the engine nor the trainer's attention runs"
        yield Missing("a C++ compiler and Python's headers", lost, "apt-get install g++ python3-dev")


def _major(version: str) -> int:
    return int(version.split(".")[0])
