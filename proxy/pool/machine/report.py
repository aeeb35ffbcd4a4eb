"""What a doctor says: the machine, what will be used for what, what is missing, why a configuration cannot run."""

from collections.abc import Iterator

import msgspec

from proxy.pool.machine.facts import Machine

GB = 1e9


class Use(msgspec.Struct, frozen=True):
    """What will be used for one purpose."""

    purpose: str
    choice: str


class Missing(msgspec.Struct, frozen=True):
    """A part that is not here."""

    part: str
    lost: str
    """What is lost without it."""
    command: str
    """What brings it."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a doctor found."""

    machine: Machine
    facts: dict[str, str] = {}
    """What the doctor asked the installed libraries, by name."""
    uses: tuple[Use, ...] = ()
    missing: tuple[Missing, ...] = ()
    refused: tuple[str, ...] = ()
    """Why the given configuration cannot run here, one sentence each."""

    @property
    def status(self) -> int:
        """The exit status: 1 when the given configuration cannot run here."""
        return 1 if self.refused else 0


def write_report(report: Report, *, as_json: bool) -> str:
    """The report for a program, or for people."""
    if as_json:
        return msgspec.json.format(msgspec.json.encode(report)).decode()
    return "\n".join(_lines(report))


def gigabytes(amount: float) -> str:
    """An amount of bytes as people read it."""
    return f"{amount / GB:.1f} GB" if amount >= GB / 10 else f"{amount / 1e6:.1f} MB"


def _lines(report: Report) -> Iterator[str]:
    yield "This machine"
    yield from _table({**_machine(report.machine), **report.facts})
    if report.uses:
        yield "\nWhat will be used"
        yield from _table({use.purpose: use.choice for use in report.uses})
    if report.missing:
        yield "\nMissing"
        for part in report.missing:
            yield f"  {part.part}: {part.lost}"
            yield f"    {part.command}"
    for reason in report.refused:
        yield f"\nCannot run here: {reason}"


def _machine(machine: Machine) -> dict[str, str]:
    gpus = [f"{gpu.name}, {gigabytes(gpu.memory_bytes)}, sm {gpu.capability}" for gpu in machine.gpus]
    runs = f"runs CUDA {machine.driver_cuda} and older" if machine.driver_cuda else "without libcuda.so.1"
    return {
        "system": f"{machine.system}, Python {machine.python}",
        "processor": f"{machine.cores} cores, {gigabytes(machine.memory_bytes)} of memory",
        "GPUs": "; ".join(gpus) or (f"not known ({machine.gpu_error})" if machine.gpu_error else "none"),
        "NVIDIA driver": f"{machine.driver}, {runs}" if machine.driver else "none",
        "free disk": "; ".join(f"{gigabytes(disk.free_bytes)} at {disk.path}" for disk in machine.disks),
        "packages": ", ".join(f"{name} {version}" for name, version in machine.packages.items()) or "none",
        "PostgreSQL server": machine.postgres or "none",
        "C compiler": "with Python's headers" if machine.compiler else "none, or no Python headers",
    }


def _table(values: dict[str, str]) -> Iterator[str]:
    width = max(map(len, values)) + 2
    for name, value in values.items():
        yield f"  {name:{width}}{value}"
