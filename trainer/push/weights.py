"""The weights of a version, from the Hugging Face directory that was exported for it, in buckets of bounded size.

A push needs only the directory, so it can be repeated without the model. Files are memory-mapped and read tensor by
tensor. Left out: writing the directory (trainer/megatron/weights.py).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from proxy.pool.errors import UserError
from proxy.pool.terminal.progress import MEGABYTE, Advance, unseen

if TYPE_CHECKING:
    from torch import Tensor

HEADER_LENGTH = 8


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, from the file's header."""

    file: Path
    name: str
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Bucket:
    """Tensors of one dtype that are sent together."""

    tensors: "list[tuple[str, Tensor]]"
    last: bool
    """Whether it is the last bucket of the push."""


@dataclass(frozen=True)
class Weights:
    """The weights that engines are to serve, and their version name."""

    version: str
    directory: Path
    sent: Advance = field(default=unseen, compare=False, kw_only=True)
    """Called with the megabytes of each bucket, once it is sent."""

    def buckets(self, limit: int) -> "Iterator[Bucket]":
        """Yield all tensors, in buckets of at most `limit` bytes; a larger tensor is a bucket of its own."""
        from safetensors import safe_open  # imports torch, which takes seconds that pushes by disk need not spend

        plan = _pack(self.tensors(), limit)
        for number, parts in enumerate(plan):
            bucket = []
            for part in parts:
                with safe_open(os.fspath(part.file), framework="pt") as file:
                    # clone: pickling a tensor of the mapped file would pickle the whole file
                    bucket.append((part.name, file.get_tensor(part.name).clone()))
            yield Bucket(bucket, last=number == len(plan) - 1)
            self.sent(sum(part.bytes for part in parts) / MEGABYTE)

    def tensors(self) -> list[StoredTensor]:
        """Every tensor of the directory. UserError when there is none."""
        files = sorted(self.directory.glob("*.safetensors"))
        tensors = [part for file in files for part in _header(file)]
        if not tensors:
            raise UserError(f"{self.directory} has no weights (*.safetensors); restore it, or go back to an older step")
        return tensors


def _header(path: Path) -> list[StoredTensor]:
    """Read the tensors' entries in a safetensors file's header: a JSON object, after its length in 8 bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH), "little")
        header = msgspec.json.decode(file.read(length))
    entries = ((name, entry) for name, entry in header.items() if name != "__metadata__")
    return [
        StoredTensor(path, name, entry["dtype"], entry["data_offsets"][1] - entry["data_offsets"][0])
        for name, entry in entries
    ]


def _pack(parts: list[StoredTensor], limit: int) -> list[list[StoredTensor]]:
    """Divide in order. A new bucket begins where the next tensor does not fit or has another dtype."""
    plan: list[list[StoredTensor]] = []
    size = 0
    for part in parts:
        if not plan or size + part.bytes > limit or part.dtype != plan[-1][-1].dtype:
            plan.append([])
            size = 0
        plan[-1].append(part)
        size += part.bytes
    return plan
