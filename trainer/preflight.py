"""Whether what is at hand belongs together: a run and its output directory, the model and the recorded tokens.

Each check is one sentence with a way out, before anything is overwritten or trained on. Left out: what configuration
and model say by themselves (trainer/config/__init__.py, trainer/config/model_shape.py), and checkpoints
(trainer/megatron/checkpoint.py).
"""

from collections.abc import Iterable
from pathlib import Path
from time import gmtime, strftime

import msgspec

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.files import write_whole
from proxy.pool.rollouts.runs import Run
from proxy.pool.tokenizer_fingerprint import fingerprint
from proxy.pool.training.finished_rollouts import tokenizers
from trainer.config.model_shape import Shape
from trainer.data.row import TrainingRow


class Owner(msgspec.Struct, frozen=True):
    """The run that an output directory belongs to."""

    run: str
    created_at: float
    """When it was opened, in its pool: another run of the same name is another one."""


def claim(output: Path, run: Run, begun: bool) -> None:
    """Make an output directory this run's. UserError when it is another's, whose checkpoints would be overwritten.

    `begun`: the run has published something. A directory without an owner's name is then taken for its own.
    """
    note, mine = output / "run.json", Owner(run.name, run.created_at)
    if note.exists():
        try:
            owner = msgspec.json.decode(note.read_bytes(), type=Owner)
        except msgspec.DecodeError as error:
            raise UserError(f"{note} is damaged ({error}); delete it if {output} is of run {run.name!r}") from error
        if owner != mine:
            opened = strftime("%Y-%m-%d %H:%M:%S", gmtime(owner.created_at))
            raise UserError(
                f"the output directory {output} holds the checkpoints of run {owner.run!r}, opened {opened} UTC, "
                f"and this is another run, {run.name!r}; set another output"
            )
        return
    found = sorted((output / "checkpoints").glob("step-*"))
    if found and not begun:
        raise UserError(
            f"the output directory {output} holds {found[-1].name} of another run, as {run.name!r} has published "
            "nothing yet; set another output"
        )
    output.mkdir(parents=True, exist_ok=True)
    write_whole(note, msgspec.json.encode(mine))


def demand_tokenizer(pool: Pool, model: Path, attempt_ids: Iterable[int]) -> None:
    """UserError when a proxy recorded one of these attempts with other tokens than the model's."""
    own = fingerprint(model)
    foreign = tokenizers(pool, attempt_ids) - {own}
    if own is not None and foreign:
        raise UserError(
            f"the pool {pool.name} holds tokens of the tokenizer {min(foreign)}, and {model} has {own}; set model to "
            "one with the tokenizer of the proxy's engine.model"
        )


def demand_known_tokens(rows: Iterable[TrainingRow], shape: Shape, model: Path) -> None:
    """UserError when a recorded token is none of the model's."""
    largest = max((int(row.tokens.max(initial=0)) for row in rows), default=0)
    if largest >= shape.vocab:
        raise UserError(
            f"the pool holds token id {largest}, and {model} has a vocabulary of {shape.vocab}; set model to the one "
            "that the proxy's engine serves"
        )
