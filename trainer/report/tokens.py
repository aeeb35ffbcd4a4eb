"""A file per step of the tokens that it trained on, so that `trainer inspect` can show them exactly.

The file holds what the pool does not know: which places of which completions were trained, with which advantage, the
trainer's logprob and the coefficient of each token. Ids, rollout logprobs and versions stay in the pool. A file is
complete or absent. Not here: tokens that were not trained, whose reasons follow from the pool.
"""

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from proxy.pool.errors import UserError
from proxy.pool.files import replacing
from trainer.data.row import TrainingRow

KEPT_STEPS = 50
"""Steps whose tokens `trainer inspect` shows exactly. At 8 to 20 bytes per trained token, they are small beside one
checkpoint."""


@dataclass(frozen=True)
class TokenNotes:
    """What the loss gave each trained token of a row, in order: arrays [trained tokens]."""

    logp: np.ndarray
    """The trainer's logprob before the step's first update. With several updates and a loss that does not compare with
    old logprobs: before the first update that has the token."""
    coefficient: np.ndarray
    """-d loss / d logp, in the first update that has the token, before the division by that update's tokens:
    scale * w(r) * A for losses of the form -w A logp, plus the KL term's part where there is one. Positive: the
    update makes the token more likely."""


@dataclass(frozen=True)
class TrainedSequence:
    """One trained sequence: arrays [trained tokens]."""

    completions: tuple[int, ...]
    """Ids of the completions it consists of, in order; its tokens are the path of the last one."""
    places: np.ndarray
    """Index of each token in the sequence."""
    segment: np.ndarray
    """Index into `completions` of the one that sampled each token."""
    advantage: np.ndarray
    logp: np.ndarray | None
    """The same as in TokenNotes; None where it is not known."""
    coefficient: np.ndarray
    """The same as in TokenNotes; the advantage instead where `logp` is None."""


def path(output: Path, step: int) -> Path:
    return output / "tokens" / f"{step:06d}.npz"


def write(target: Path, rows: Sequence[TrainingRow], notes: Mapping[int, TokenNotes]) -> None:
    """Write the record of a step. Raises OSError when the disk is full."""
    known = [row for row in rows if id(row) in notes]
    values = [notes[id(row)] for row in known]
    target.parent.mkdir(parents=True, exist_ok=True)
    columns = {
        "completions": _joined([np.array(row.completions, dtype=np.int64) for row in known], np.int64),
        "parts": np.array([len(row.completions) for row in known], dtype=np.int64),
        "tokens": np.array([len(row.places) for row in known], dtype=np.int64),
        "places": _joined([row.places for row in known], np.int32),
        "segment": _joined([row.segment[row.places] for row in known], np.int32),
        "advantage": _joined([row.advantage[row.places] for row in known], np.float32),
        "logp": _joined([item.logp for item in values], np.float32),
        "coefficient": _joined([item.coefficient for item in values], np.float32),
    }
    # np.savez_compressed saves little more space and takes twice the time.
    with replacing(target) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        for name, column in columns.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as part:
                np.lib.format.write_array(part, column)


def read(source: Path) -> list[TrainedSequence]:
    """Read the record of a step. Raises UserError when the file is damaged, FileNotFoundError when there is none."""
    try:
        with np.load(source) as file:
            stored = {name: file[name] for name in file.files}
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise UserError(f"{source} is damaged ({error}); delete it to see the step without its coefficients") from error
    parts = np.split(stored["completions"], np.cumsum(stored["parts"])[:-1])
    names = ("places", "segment", "advantage", "logp", "coefficient")
    columns = [np.split(stored[name], np.cumsum(stored["tokens"])[:-1]) for name in names]
    rows = zip(parts, *columns, strict=True) if len(stored["parts"]) else ()
    return [TrainedSequence(tuple(completions.tolist()), *values) for completions, *values in rows]


def prune(output: Path, step: int) -> None:
    """Delete all records but those of the newest KEPT_STEPS steps."""
    for old in (output / "tokens").glob("*.npz"):
        if old.stem.isdecimal() and int(old.stem) <= step - KEPT_STEPS:
            old.unlink(missing_ok=True)


def _joined(arrays: Sequence[np.ndarray], kind: type[np.generic]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=kind), *arrays]).astype(kind)
