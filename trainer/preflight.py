"""Checks that a run belongs to its output directory, and the model to the recorded tokens.

Each raises UserError before anything is overwritten or trained on. Not here: what can be checked on configuration and
model alone (trainer/config), and checkpoints (trainer/megatron/checkpoint.py).
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from time import gmtime, strftime

import msgspec

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.files import write_whole
from proxy.pool.rollouts.runs import Run
from proxy.pool.tokenizer_fingerprint import fingerprint
from proxy.pool.training.finished_rollouts import tokenizers
from trainer.config import Config, Parallel
from trainer.config.model_shape import ModelShape
from trainer.data.row import TrainingRow
from trainer.push.engine_group import EngineGroup
from trainer.push.target import PushTarget, ServerInfo


class OutputOwner(msgspec.Struct, frozen=True):
    """The run that an output directory belongs to."""

    run: str
    created_at: float
    """Unix seconds. Tells it from a run of the same name in another pool."""


def claim(output: Path, run: Run, begun: bool) -> None:
    """Make an output directory this run's. Raises UserError when it is another run's, which would be overwritten.

    `begun`: the run has published something; a directory that names no owner is then taken for its own.
    """
    file, mine = output / "run.json", OutputOwner(run.name, run.created_at)
    if file.exists():
        try:
            owner = msgspec.json.decode(file.read_bytes(), type=OutputOwner)
        except msgspec.DecodeError as error:
            raise UserError(f"{file} is damaged ({error}); delete it if {output} is of run {run.name!r}") from error
        if owner != mine:
            opened = strftime("%Y-%m-%d %H:%M:%S", gmtime(owner.created_at))
            raise UserError(
                f"the output directory {output} holds the checkpoints of run {owner.run!r}, opened {opened} UTC, "
                f"and this is another run, {run.name!r}; set another output"
            )
        return
    checkpoints = sorted((output / "checkpoints").glob("step-*"))
    if checkpoints and not begun:
        raise UserError(
            f"the output directory {output} holds {checkpoints[-1].name} of another run, as {run.name!r} has published "
            "nothing yet; set another output"
        )
    output.mkdir(parents=True, exist_ok=True)
    write_whole(file, msgspec.json.encode(mine))


def demand_heads(config: Config) -> None:
    """Raise UserError when the head of an engine that answers computes in another precision than the trainer's.

    An engine that is away is compared when weights are pushed to it.
    """

    def ask(engine: PushTarget) -> ServerInfo:
        return msgspec.convert(engine.ask("/server_info"), ServerInfo)

    about = EngineGroup(PushTarget(url, config.push) for url in config.push.engines).each(ask)
    heads = {engine.url: info.head_float32 for engine, info in about.items() if info.head_float32 is not None}
    if difference := other_heads(config.parallel, heads):
        raise UserError(difference)


def other_heads(parallel: Parallel, heads: Mapping[str, bool]) -> str:
    """One sentence on the engines whose heads compute otherwise than the trainer's; empty where there are none.

    `heads`: the engine's URL -> whether its head computes in fp32. A trainer in fp32 is compared with no engine.
    """
    urls = [url for url, head in heads.items() if head != parallel.head_float32]
    if not urls or parallel.precision == "float32":
        return ""
    theirs, flag, value = ("bf16", "with", "false") if parallel.head_float32 else ("fp32", "without", "true")
    return (
        f"parallel.head_float32 = {str(parallel.head_float32).lower()}, and the heads of these engines compute in "
        f"{theirs}: {' '.join(urls)}; logprobs differ by that, so start SGLang {flag} --enable-fp32-lm-head "
        f"(engine.extra_args), or set parallel.head_float32 = {value}"
    )


def demand_tokenizer(pool: Pool, model: Path, attempt_ids: Iterable[int]) -> None:
    """Raise UserError when a proxy recorded one of these attempts with another tokenizer than the model's."""
    own = fingerprint(model)
    foreign = tokenizers(pool, attempt_ids) - {own}
    if own is not None and foreign:
        raise UserError(
            f"the pool {pool.name} holds tokens of the tokenizer {min(foreign)}, and {model} has {own}; set model to "
            "one with the tokenizer of the proxy's engine.model"
        )


def demand_known_tokens(rows: Iterable[TrainingRow], shape: ModelShape, model: Path) -> None:
    """Raise UserError when a recorded token id is outside the model's vocabulary."""
    largest = max((int(row.tokens.max(initial=0)) for row in rows), default=0)
    if largest >= shape.vocab:
        raise UserError(
            f"the pool holds token id {largest}, and {model} has a vocabulary of {shape.vocab}; set model to the one "
            "that the proxy's engine serves"
        )
