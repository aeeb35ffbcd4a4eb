"""The weights of a version, from the Hugging Face directory that was exported for it, in buckets of bounded size.

The directory is all that a push needs, so that it can be repeated without the model. Files are memory-mapped and read
tensor by tensor. Left out: writing the directory (trainer/megatron/weights.py).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from proxy.pool.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

HEADER_LENGTH = 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as the file's header has it."""

    file: Path
    name: str
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that travel together."""

    tensors: "list[tuple[str, Tensor]]"
    last: bool
    """No other follows."""


@dataclass(frozen=True)
class Weights:
    """What the engines are to serve, and under which name."""

    version: str
    directory: Path

    def buckets(self, limit: int) -> "Iterator[Bucket]":
        """All tensors, in buckets of at most `limit` bytes; a larger tensor is a bucket of its own."""
        from safetensors import safe_open  # with it comes torch: seconds that the other ways do not pay

        plan = _pack(self.parts(), limit)
        for number, parts in enumerate(plan):
            tensors = []
            for part in parts:
                with safe_open(os.fspath(part.file), framework="pt") as file:
                    # a tensor of its own: pickled, one that lies in the mapped file would bring the whole file
                    tensors.append((part.name, file.get_tensor(part.name).clone()))
            yield Bucket(tensors, last=number == len(plan) - 1)

    def parts(self) -> list[StoredTensor]:
        """Every tensor of the directory. UserError when there is none."""
        files = sorted(self.directory.glob("*.safetensors"))
        found = [part for file in files for part in _header(file)]
        if not found:
            raise UserError(
                f"{self.directory} holds no weights (*.safetensors); restore it, or go back to an older step"
            )
        return found


def _header(path: Path) -> list[StoredTensor]:
    """What a safetensors file says of its tensors: a JSON object behind its length in 8 bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH), "little")
        header = msgspec.json.decode(file.read(length))
    entries = ((name, entry) for name, entry in header.items() if name != "__metadata__")
    return [
        StoredTensor(path, name, entry["dtype"], entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in entries
    ]


def _pack(parts: list[StoredTensor], limit: int) -> list[list[StoredTensor]]:
    """In order; a new bucket begins where the next tensor does not fit, or is of another dtype."""
    plan: list[list[StoredTensor]] = []
    size = 0
    for part in parts:
        if not plan or size + part.bytes > limit or part.dtype != plan[-1][-1].dtype:
            plan.append([])
            size = 0
        plan[-1].append(part)
        size += part.bytes
    return plan
