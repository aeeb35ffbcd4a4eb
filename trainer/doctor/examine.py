"""What `trainer doctor` says, from facts alone: nothing here asks the machine."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from proxy.pool.machine.facts import Machine
from proxy.pool.machine.missing import install_command, missing_torch
from proxy.pool.machine.report import Missing, Report, Use, gigabytes
from trainer.config import Config
from trainer.config.model_shape import ModelShape
from trainer.doctor.memory import Held, checkpoint_bytes, held
from trainer.doctor.probe import TrainerProbe

MAGI = Missing(
    "MagiAttention",
    "FlexAttention is used over prefix trees instead; PyPI's package of that name is empty",
    "build it from https://github.com/SandAI-org/MagiAttention",
)
TRANSFORMER_ENGINE = Missing(
    "Transformer Engine",
    "norm and linear layer are two kernels instead of one; its torch part has no wheel and must be built",
    "pip install --no-build-isolation 'transformer-engine[pytorch,core_cu13]>=2.9,<2.12'    # megatron-core's range",
)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All that was read and asked."""

    machine: Machine
    probe: TrainerProbe
    shape: ModelShape | None = None
    """Shape of the configuration's model, if it can be trained."""
    config_errors: tuple[str, ...] = ()
    """Why the model cannot be trained as configured, or the pool cannot be used."""


def examine(facts: Facts, config: Config | None = None) -> Report:
    """Say what there is, what will be used and what is missing; and why a configuration cannot run here."""
    refused = list(facts.config_errors)
    if config:
        refused += _refusals(facts, config)
    return Report(
        machine=facts.machine,
        facts=_told(facts.probe),
        uses=tuple(_uses(facts, config)),
        missing=tuple(_missing(facts)),
        refused=tuple(refused),
    )


def _told(probe: TrainerProbe) -> dict[str, str]:
    if probe.error:
        return {"torch": f"cannot be asked: {probe.error}"}
    return {"torch": probe.torch.described(), "NCCL": probe.torch.nccl or "none"}


def _uses(facts: Facts, config: Config | None) -> Iterator[Use]:
    probe = facts.probe
    if not probe.error:
        device = f"{probe.torch.devices} GPUs" if probe.device == "cuda" else "the CPU"
        yield Use("device", f"{device}, with {probe.backend} between ranks")
        if config and probe.device == "cuda" and 0 < probe.torch.devices < config.parallel.processes:
            yield Use("machines", _machines(config.parallel.processes, probe.torch.devices))
        yield Use("attention", f"{probe.attention}, over prefix trees")
        yield Use("layers", probe.layers)
        yield Use("optimizer", probe.optimizer)
    if config and facts.shape:
        yield Use("each rank holds", _amounts(held(facts.shape, config)))
        size = checkpoint_bytes(facts.shape, config.parallel.precision)
        yield Use("each step on disk", f"{gigabytes(size)}, the newest {config.keep_checkpoints} kept")


def _machines(ranks: int, gpus: int) -> str:
    return f"{-(-ranks // gpus)} like this one, as {ranks} ranks take a GPU each; start torchrun on every one"


def _amounts(rank: Held) -> str:
    parts = {"weights": rank.weights, "gradients": rank.gradients, "optimizer": rank.optimizer}
    if rank.reference:
        parts["initial model"] = rank.reference
    told = ", ".join(f"{name} {gigabytes(amount)}" for name, amount in parts.items())
    return f"{gigabytes(rank.total)} ({told}), and the activations of a micro-batch"


def _missing(facts: Facts) -> Iterator[Missing]:
    machine, probe = facts.machine, facts.probe
    yield from missing_torch(machine, probe.torch)
    if "megatron-core" not in machine.packages:
        yield Missing("megatron-core", "no trainer runs here", install_command(machine))
    if machine.gpus:
        if not probe.magi:
            yield MAGI
        if "transformer-engine" not in machine.packages:
            yield TRANSFORMER_ENGINE


def _refusals(facts: Facts, config: Config) -> Iterator[str]:
    probe, machine, processes = facts.probe, facts.machine, config.parallel.processes
    if probe.error:
        yield f"the trainer cannot start ({probe.error}); {install_command(machine)} brings what it needs"
    if probe.too_many:
        yield probe.too_many
    if probe.device == "cuda" and not machine.compiler:
        yield (
            "there is no C++ compiler with Python's headers, which Triton needs to start the attention's kernels; "
            "apt-get install g++ python3-dev brings both"
        )
    if facts.shape is None:
        return
    rank = held(facts.shape, config).total
    if probe.device == "cuda":
        smallest = min((gpu.memory_bytes for gpu in machine.gpus), default=0)
        if smallest and rank > smallest:
            yield (
                f"each rank holds {gigabytes(rank)} before any activation, and a GPU has {gigabytes(smallest)}; raise "
                "parallel.tensor, pipeline or expert, or set precision = bfloat16 and distributed_optimizer = true"
            )
    elif rank * processes > machine.memory_bytes:
        yield (
            f"{processes} ranks hold {gigabytes(rank * processes)} before any activation, and this machine has "
            f"{gigabytes(machine.memory_bytes)}; take a smaller model or fewer ranks"
        )
    yield from _disk_refusals(facts, facts.shape, config)


def _disk_refusals(facts: Facts, shape: ModelShape, config: Config) -> Iterator[str]:
    """The checkpoint being written lies beside those that are kept. What a run wrote before counts as free here."""
    kept = config.keep_checkpoints + 1
    needed = kept * checkpoint_bytes(shape, config.parallel.precision)
    free = next((disk.free_bytes for disk in facts.machine.disks if Path(disk.path) == Path(config.output)), None)
    if free is not None and needed > free:
        yield (
            f"{kept} checkpoints with their exported models take {gigabytes(needed)}, and {config.output} has "
            f"{gigabytes(free)} free; lower keep_checkpoints or name another output"
        )
