"""What `proxy doctor` says, from facts alone: nothing here asks the machine."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from proxy.config import EngineConfig, ProxyConfig, engine_urls
from proxy.doctor.probe import EngineProbe
from proxy.doctor.weights import gpus_of, weight_bytes
from proxy.http.auth import is_loopback
from proxy.pool.errors import UserError
from proxy.pool.machine.facts import Machine
from proxy.pool.machine.missing import DRIVER, INSTALL_GPU, install_command, missing_torch
from proxy.pool.machine.report import Missing, Report, Use, gigabytes


class Sandboxes(msgspec.Struct, frozen=True, kw_only=True):
    """The kind of sandbox that `harness run` would take here (harness/setup/probe.py)."""

    kind: str = ""
    promise: str = ""
    passed_over: str = ""
    """Why no better kind."""
    error: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that was read and asked."""

    machine: Machine
    probe: EngineProbe
    sandboxes: Sandboxes
    cuda: bool
    """Whether the engine runs on a GPU: the answer of proxy/engine/sglang.py."""
    gpu_found: bool
    """Whether the driver finds a GPU, also where the engine runs on the CPU."""
    toolkit: Path | None
    """The CUDA toolkit that kernels are compiled with: the answer of proxy/engine/toolkit.py."""
    wanted_torch: str = ""
    """The torch that the installed SGLang pins."""
    config_errors: tuple[str, ...] = ()
    """Why the pool of the configuration cannot be used, or `proxy serve` would not begin with it."""


def examine(facts: Facts, config: ProxyConfig | None = None) -> Report:
    """Say what there is, what will be used and what is missing; and why a configuration cannot run here."""
    return Report(
        machine=facts.machine,
        facts=_told(facts),
        uses=tuple(_uses(facts, config)),
        missing=tuple(_missing(facts)),
        refused=tuple(_refusals(facts, config)) if config else (),
    )


def _told(facts: Facts) -> dict[str, str]:
    probe = facts.probe
    if probe.error:
        return {"torch": f"cannot be asked: {probe.error}"}
    told = {"torch": probe.torch.described(), "NCCL": probe.torch.nccl or "none"}
    if probe.kernels or probe.broken:
        kernels = [
            *(f"{name} {version}" for name, version in probe.kernels.items()),
            *(f"{n} broken" for n in probe.broken),
        ]
        told["kernels"] = ", ".join(kernels)
    return told


def _uses(facts: Facts, config: ProxyConfig | None) -> Iterator[Use]:
    packages = facts.machine.packages
    if config and not _runs_here(config.engine):
        yield Use("engine", f"not of this machine: {', '.join(engine_urls(config.engine.url))}")
    elif "sglang" not in packages:
        yield Use("engine", "none: SGLang is not installed")
    elif facts.cuda:
        yield Use("engine", f"SGLang {packages['sglang']} on CUDA, with its own kernels")
        yield Use("kernel compiler", f"nvcc of {facts.toolkit}" if facts.toolkit else "none")
    else:
        yield Use("engine", f"SGLang {packages['sglang']} on the CPU, with stand-ins for its CUDA kernels")
    if config:
        file = "://" not in config.pool or config.pool.startswith("sqlite")
        yield Use("pool", "SQLite, for processes of this machine" if file else "PostgreSQL")
    sandboxes = facts.sandboxes
    if sandboxes.kind:
        yield Use("sandboxes", f"{sandboxes.kind}, {sandboxes.promise}")


def _missing(facts: Facts) -> Iterator[Missing]:
    machine, probe = facts.machine, facts.probe
    if not probe.error:  # else nobody knows what torch has
        yield from missing_torch(machine, probe.torch)
    if machine.gpus and not facts.gpu_found:
        yield Missing("CUDA", "nvidia-smi sees a GPU, and the driver's library finds none", DRIVER)
    if facts.cuda or facts.gpu_found:
        yield from _missing_on_cuda(facts)
    if "sglang" not in machine.packages:
        yield Missing("SGLang", "no engine runs here", install_command(machine))
    if facts.sandboxes.kind != "docker":
        why = facts.sandboxes.passed_over or facts.sandboxes.error
        yield Missing(
            "Docker",
            f"no task with an image or a service, and less isolation of agents ({why})",
            "apt-get install docker.io && harness agents install runtime",
        )
    if "psycopg" not in machine.packages:
        yield Missing("psycopg", "no pool on PostgreSQL, so one machine only", "pip install 'blackforge[postgres]'")


def _missing_on_cuda(facts: Facts) -> Iterator[Missing]:
    torch, packages = facts.probe.torch, facts.machine.packages
    if torch.cuda and facts.wanted_torch and torch.version.split("+")[0] != facts.wanted_torch:
        lost = f"SGLang's kernels are built for torch {facts.wanted_torch}, and {torch.version} may not load them"
        yield Missing(f"torch {facts.wanted_torch}", lost, INSTALL_GPU)
    if "sglang" in packages and "sglang-kernel" not in packages:
        yield Missing("sglang-kernel", "no engine runs on the GPU", INSTALL_GPU)
    for name, reason in facts.probe.broken.items():
        yield Missing(name, f"cannot be imported: {reason}", INSTALL_GPU)
    if facts.toolkit is None:
        yield Missing(
            "nvcc", "SGLang cannot compile the kernels that it compiles when they are first called", INSTALL_GPU
        )


def _refusals(facts: Facts, config: ProxyConfig) -> Iterator[str]:
    yield from facts.config_errors
    if _runs_here(config.engine):
        yield from _engine_refusals(facts, config.engine)


def _runs_here(engine: EngineConfig) -> bool:
    """Whether `proxy engine` would start the engine here: no address is given, or one of this machine."""
    urls = [engine.url] if isinstance(engine.url, str) else engine.url
    return not any(urls) or any(is_loopback(urlsplit(url).hostname or "") for url in urls)


def _engine_refusals(facts: Facts, engine: EngineConfig) -> Iterator[str]:
    machine, model = facts.machine, Path(engine.model)
    if "sglang" not in machine.packages:
        yield f"SGLang is not installed; {install_command(machine)} brings it"
    else:
        yield from _library_refusals(facts)
    if not (model / "config.json").is_file():
        yield f"the model directory {model} has no config.json; name one in Hugging Face format"
        return
    try:
        weights = weight_bytes(model, engine.dtype)
    except UserError as error:
        yield str(error)
        return
    if not facts.cuda:
        if weights > machine.memory_bytes:
            yield (
                f"the weights of {model} take {gigabytes(weights)}, and this machine has "
                f"{gigabytes(machine.memory_bytes)}; take a smaller model or a machine with a GPU"
            )
        return
    if facts.probe.error:  # nobody knows which GPUs torch sees
        return
    if facts.probe.torch.devices == 0:
        yield f"engine.device = {engine.device} runs on CUDA, and torch sees no GPU; see what is missing, or set cpu"
        return
    yield from _memory_refusals(facts, engine, weights)


def _library_refusals(facts: Facts) -> Iterator[str]:
    """Why SGLang 0.5.23 would not start here: without these it fails when it is imported or at its first kernel."""
    machine, probe, install = facts.machine, facts.probe, install_command(facts.machine)
    if probe.error:
        yield f"the engine's libraries cannot be asked ({probe.error}); mend `python -m proxy.doctor.probe` first"
        return
    if not probe.torch.version:
        yield f"torch cannot be imported ({probe.torch.error}); {install} brings it"
    if not facts.cuda:
        return
    if "sglang-kernel" not in machine.packages:
        yield f"SGLang does not start on CUDA without sglang-kernel, which is not installed; {INSTALL_GPU} brings it"
    elif "sgl_kernel" in probe.broken:
        reason = probe.broken["sgl_kernel"]
        yield f"SGLang's kernels (sgl_kernel) cannot be imported: {reason}; {INSTALL_GPU} brings those of this torch"
    if facts.toolkit is None:
        yield f"there is no nvcc, with which SGLang compiles kernels at their first call; {INSTALL_GPU} brings it"
    if not machine.compiler:
        yield (
            "there is no C++ compiler with Python's headers, which Triton and nvcc need to start a kernel; "
            "apt-get install g++ python3-dev brings both"
        )


def _memory_refusals(facts: Facts, engine: EngineConfig, weights: int) -> Iterator[str]:
    needed, shared = gpus_of(engine.extra_args)
    visible = facts.probe.torch.devices
    if needed > visible:
        yield (
            f"engine.extra_args = {list(engine.extra_args)} wants {needed} GPUs, and torch sees {visible}; "
            "lower --tp-size"
        )
        return
    smallest = min((gpu.memory_bytes for gpu in facts.machine.gpus), default=0)
    if smallest and weights / shared > smallest:
        yield (
            f"the weights of {engine.model} take {gigabytes(weights / shared)} on each of {shared} GPUs, and one has "
            f"{gigabytes(smallest)}; divide them over more GPUs (engine.extra_args, --tp-size)"
        )
