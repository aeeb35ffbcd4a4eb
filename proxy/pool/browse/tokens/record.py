"""Reads the record of the tokens that a train step learned from: advantage, logprob and coefficient of each.

The trainer writes it to OUTPUT/tokens (trainer/report/tokens.py) as a zip file of numpy arrays. It is read here without
numpy, which the proxy does not have, and only as far as the wanted completions need it.
"""

import ast
import zipfile
from array import array
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from proxy.pool.errors import UserError
from proxy.pool.input_files import open_input

KINDS = {"<i8": "q", "<i4": "i", "<f4": "f"}
"""numpy's name of a type -> array's."""
COLUMNS = ("places", "segment", "advantage", "logp", "coefficient")
MOST_HEADER = 4096
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class TokenNote:
    """What a step's loss gave one token. `docs/training.md` says what a coefficient is."""

    advantage: float
    logp: float
    """The trainer's, before the step's first update."""
    coefficient: float


def record_of(checkpoint: str, step: int) -> Path:
    """Return the record of a step, from the place of its checkpoint: OUTPUT/checkpoints/step-000012."""
    return Path(checkpoint).parent.parent / "tokens" / f"{step:06d}.npz"


def notes(file: Path, completions: Collection[int]) -> dict[tuple[int, int], TokenNote]:
    """Return what the record says of tokens that these completions sampled: (completion, place in its path) -> note.

    A token that several branches trained has the note of the first one. FileNotFoundError when there is no record,
    OSError when it is a link, as the pool names its place and anybody may have written that, UserError when it is
    damaged or a pipe.
    """
    try:
        with open_input(file, follow=False) as opened, zipfile.ZipFile(opened) as archive:
            return dict(_notes(archive, set(completions)))
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError, SyntaxError) as error:
        raise UserError(f"{file} is damaged ({error}); delete it to see the tokens without their advantages") from error


def _notes(archive: zipfile.ZipFile, wanted: set[int]) -> Iterator[tuple[tuple[int, int], TokenNote]]:
    parts, lengths = _whole(archive, "parts"), _whole(archive, "tokens")
    ids = _whole(archive, "completions")
    ends, starts_of = list(accumulate(parts)), [0, *accumulate(lengths)]
    rows = [(ids[end - count : end], number) for number, (count, end) in enumerate(zip(parts, ends, strict=True))]
    chosen = [(own, starts_of[number], lengths[number]) for own, number in rows if wanted.intersection(own)]
    if not chosen:
        return
    ranges = [(start, length) for _, start, length in chosen]
    columns = [_ranges(archive, name, ranges) for name in COLUMNS]
    seen: set[tuple[int, int]] = set()
    for (own, _, _), places, segment, advantage, logp, coefficient in zip(chosen, *columns, strict=True):
        for at, place in enumerate(places):
            key = (own[segment[at]], int(place))
            if key[0] in wanted and key not in seen:
                seen.add(key)
                yield key, TokenNote(advantage[at], logp[at], coefficient[at])


def _whole(archive: zipfile.ZipFile, name: str) -> "array[Any]":
    with archive.open(f"{name}.npy") as part:
        kind, count = _header(part)
        return _read(part, kind, count)


def _ranges(archive: zipfile.ZipFile, name: str, ranges: list[tuple[int, int]]) -> "list[array[Any]]":
    """Read these (start, length) of a column, which are in order."""
    with archive.open(f"{name}.npy") as part:
        kind, count = _header(part)
        size, at, found = array(kind).itemsize, 0, []
        for start, length in ranges:
            if start + length > count:
                raise ValueError(f"{name} has {count} values")
            _skip(part, (start - at) * size)
            found.append(_read(part, kind, length))
            at = start + length
        return found


def _header(part: IO[bytes]) -> tuple[str, int]:
    """Read the header of an array of one dimension; return its type and length."""
    magic = part.read(8)
    if magic[:6] != b"\x93NUMPY":
        raise ValueError("no numpy array")
    size = int.from_bytes(part.read(2 if magic[6] == 1 else 4), "little")
    if size > MOST_HEADER:
        raise ValueError("the header of an array is too long")
    header = ast.literal_eval(part.read(size).decode("latin-1"))
    (count,) = header["shape"]
    return KINDS[header["descr"]], int(count)


def _read(part: IO[bytes], kind: str, count: int) -> "array[Any]":
    values = array(kind)
    data = part.read(count * values.itemsize)
    if len(data) != count * values.itemsize:
        raise EOFError("it ends early")
    values.frombytes(data)
    return values


def _skip(part: IO[bytes], count: int) -> None:
    while count > 0:
        read = len(part.read(min(count, READ_BYTES)))
        if not read:
            raise EOFError("it ends early")
        count -= read
