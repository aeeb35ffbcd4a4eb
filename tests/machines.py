"""Machines for the tests of the doctors, which must not depend on the machine that they run on."""

from proxy.pool.machine.facts import Disk, Gpu, Machine
from proxy.pool.machine.torch_build import TorchBuild

GB = 10**9
CPU_TORCH = TorchBuild(version="2.13.0+cpu")
CUDA_TORCH = TorchBuild(version="2.14.1+cu130", cuda="13.0", archs=("sm_90",), nccl="2.30.7", devices=8)
LAPTOP = Machine(
    system="Linux x86_64, glibc 2.36",
    python="3.11.7",
    cores=2,
    memory_bytes=16 * GB,
    disks=(Disk("/", 50 * GB),),
    packages={"torch": "2.13.0+cpu", "sglang": "0.5.23", "megatron-core": "0.16.1"},
    compiler=True,
)
NODE = Machine(
    system="Linux x86_64, glibc 2.39",
    python="3.12.3",
    cores=192,
    memory_bytes=2000 * GB,
    gpus=(Gpu(name="NVIDIA H100 80GB HBM3", memory_bytes=85 * GB, free_bytes=84 * GB, capability="9.0"),) * 8,
    driver="580.95.05",
    driver_cuda="13.0",
    disks=(Disk("/", 5000 * GB),),
    packages={
        "torch": "2.14.1+cu130", "sglang": "0.5.23", "sglang-kernel": "0.4.10", "megatron-core": "0.16.1",
        "psycopg": "3.3.9",
    },
    compiler=True,
)  # fmt: skip
