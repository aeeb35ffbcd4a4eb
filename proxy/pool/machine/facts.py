"""Reads what this machine has: GPUs, driver, memory, disks, installed packages. Decides nothing from it."""

import ctypes
import os
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import msgspec

PACKAGES = (
    "torch", "triton", "nvidia-nccl-cu13", "megatron-core", "transformers", "sglang", "sglang-kernel",
    "flashinfer-python", "flash-attn-4", "flash-attn", "transformer-engine", "magi-attention", "apex", "psycopg",
)  # fmt: skip
"""Packages whose versions a doctor tells."""
QUERY = ("name", "memory.total", "memory.free", "compute_cap", "driver_version")
"""What nvidia-smi is asked about each GPU."""
SMI_SECONDS = 60
"""Time for nvidia-smi, which takes tens of seconds where no daemon keeps the driver loaded."""
MIB = 1 << 20


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One NVIDIA GPU."""

    name: str
    memory_bytes: int
    free_bytes: int
    capability: str
    """Its compute capability, such as 9.0."""


class Disk(msgspec.Struct, frozen=True):
    """The file system of one directory."""

    path: str
    free_bytes: int


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What this machine has."""

    system: str
    python: str
    cores: int
    memory_bytes: int
    """What this process may use: the machine's memory, or less where a control group limits it."""
    gpus: tuple[Gpu, ...] = ()
    gpu_error: str = ""
    """Why nvidia-smi, which is installed here, named no GPUs: whether there are any is not known then."""
    driver: str = ""
    """The NVIDIA driver's version; empty where there is none."""
    driver_cuda: str = ""
    """The newest CUDA version that the driver runs, such as 13.0."""
    disks: tuple[Disk, ...] = ()
    packages: dict[str, str] = {}
    """Versions of those of PACKAGES that are installed."""
    postgres: str = ""
    """Where PostgreSQL's server is installed; empty where it is not."""
    compiler: bool = False
    """Whether there is a C compiler with Python's headers, which Triton needs to start a kernel."""


def read_machine(directories: Iterable[Path]) -> Machine:
    """Read everything. `directories`: those whose file systems are to be told; they need not exist yet."""
    gpus, driver, gpu_error = read_gpus()
    return Machine(
        system=f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
        python=platform.python_version(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=_memory(),
        gpus=gpus,
        gpu_error=gpu_error,
        driver=driver,
        driver_cuda=_driver_cuda(),
        disks=tuple(_disk(directory) for directory in dict.fromkeys(directories)),
        packages={name: version for name in PACKAGES if (version := _version(name))},
        postgres=_postgres(),
        compiler=_has_compiler(),
    )


def read_gpus() -> tuple[tuple[Gpu, ...], str, str]:
    """Ask nvidia-smi for the GPUs and the driver's version. The third value says why it gave no answer.

    All three are empty where nvidia-smi is not installed.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS)
        if answer.returncode == 0:
            return *parse_gpus(answer.stdout), ""
    except FileNotFoundError:
        return (), "", ""
    except subprocess.TimeoutExpired:
        return (), "", f"nvidia-smi gave no answer within {SMI_SECONDS} s"
    except (OSError, ValueError) as error:
        return (), "", f"nvidia-smi cannot be used: {error}"
    words = f"{answer.stdout}\n{answer.stderr}".split()
    return (), "", f"nvidia-smi ended with status {answer.returncode}: {' '.join(words)[:300] or 'no output'}"


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs in nvidia-smi's answer to QUERY, and the driver's version. A GPU that cannot tell its memory has 0.

    ValueError when the answer is something else: where a GPU fell off the bus, a line may be an error message.
    """
    gpus, driver = [], ""
    for line in filter(str.strip, text.splitlines()):
        fields = [field.strip() for field in line.rsplit(",", len(QUERY) - 1)]
        if len(fields) != len(QUERY):
            raise ValueError(f"its answer has the line {line.strip()[:200]!r}")
        name, total, free, capability, driver = fields
        gpus.append(Gpu(name=name, memory_bytes=_mib(total), free_bytes=_mib(free), capability=capability))
    return tuple(gpus), driver


def _mib(text: str) -> int:
    return int(text) * MIB if text.isdigit() else 0


def _driver_cuda() -> str:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    version = ctypes.c_int(0)
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return ""
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _memory() -> int:
    amounts = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            amounts.append(int(Path(file).read_text()))
        except (OSError, ValueError):  # absent, or "max"
            continue
    return min(amounts)


def _disk(directory: Path) -> Disk:
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return Disk(str(directory), shutil.disk_usage(existing).free)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _postgres() -> str:
    """The newest of Debian's places, which are not on the PATH, or whatever is on it."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    return str(places[-1]) if places else shutil.which("postgres") or ""


def _has_compiler() -> bool:
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    return bool(compiler) and Path(sysconfig.get_paths()["include"], "Python.h").is_file()
