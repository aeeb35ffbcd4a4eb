"""The tokens that a step trained on, as a file beside its checkpoint: what `trainer inspect` shows exactly.

Recorded is what the pool does not know: which places of which completions were trained, with which advantage, what the
trainer's logprob was and what coefficient each token got. Ids, rollout logprobs and versions stay in the pool. A file
is whole or not there. Left out: tokens that were not trained, whose reasons follow from the pool.
"""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proxy.pool.errors import UserError
from proxy.pool.files import replacing
from trainer.data.row import TrainingRow


@dataclass(frozen=True)
class Notes:
    """What a step's loss gave the trained tokens of a row, in order."""

    logp: np.ndarray
    """The trainer's logprob, before the update."""
    coefficient: np.ndarray
    """-d loss / d logp before the division by the batch's tokens: scale * w(r) * A for the losses of the form
    -w A logp, and the same thing for any other (with the KL term, where there is one). Positive: the token becomes
    likelier."""


@dataclass(frozen=True)
class Recorded:
    """One trained sequence. The arrays have an entry per trained token."""

    completions: tuple[int, ...]
    """Ids of the completions it consists of, in order; its tokens are the path of the last one."""
    places: np.ndarray
    segment: np.ndarray
    """Which of the completions sampled a token."""
    advantage: np.ndarray
    logp: np.ndarray | None
    """The trainer's logprob before the update; None where it is not known."""
    coefficient: np.ndarray
    """As `Notes` has it, or the advantage where `logp` is None."""


def path(output: Path, step: int) -> Path:
    return output / "tokens" / f"{step:06d}.npz"


def write(target: Path, rows: Sequence[TrainingRow], notes: Mapping[int, Notes]) -> None:
    """Write the record of a step. OSError where there is no room."""
    known = [row for row in rows if id(row) in notes]
    found = [notes[id(row)] for row in known]
    target.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "completions": _joined([np.array(row.completions, dtype=np.int64) for row in known], np.int64),
        "parts": np.array([len(row.completions) for row in known], dtype=np.int64),
        "tokens": np.array([len(row.places) for row in known], dtype=np.int64),
        "places": _joined([row.places for row in known], np.int32),
        "segment": _joined([row.segment[row.places] for row in known], np.int32),
        "advantage": _joined([row.advantage[row.places] for row in known], np.float32),
        "logp": _joined([item.logp for item in found], np.float32),
        "coefficient": _joined([item.coefficient for item in found], np.float32),
    }
    # np.savez_compressed compresses little more, in twice the time
    with replacing(target) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, column in columns.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(part, column)


def read(source: Path) -> list[Recorded]:
    """The record of a step. UserError when the file is damaged, FileNotFoundError when it is not there."""
    try:
        with np.load(source) as file:
            stored = {name: file[name] for name in file.files}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{source} is damaged ({error}); delete it to see the step without its coefficients") from error
    parts = np.split(stored["completions"], np.cumsum(stored["parts"])[:-1])
    names = ("places", "segment", "advantage", "logp", "coefficient")
    columns = [np.split(stored[name], np.cumsum(stored["tokens"])[:-1]) for name in names]
    rows = zip(parts, *columns, strict=True) if len(stored["parts"]) else ()
    return [Recorded(tuple(found.tolist()), *values) for found, *values in rows]


def prune(output: Path, step: int, keep: int) -> None:
    """Delete the records that are older than the newest `keep`."""
    for old in (output / "tokens").glob("*.npz"):
        if old.stem.isdecimal() and int(old.stem) <= step - keep:
            old.unlink(missing_ok=True)


def _joined(arrays: Sequence[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=kind), *arrays]).astype(kind)
