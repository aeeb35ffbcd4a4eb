"""How much memory a model's weights take in an engine, and over how many GPUs the engine divides them."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from proxy.pool.errors import UserError
from proxy.pool.settings_file import NotNegative

SIZES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
"""Bytes of a number by `engine.dtype`. "auto" keeps the file's."""
STORED = {
    "C64": 8, "F64": 8, "F32": 4, "BF16": 2, "F16": 2,
    "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2,
}  # fmt: skip
"""Bytes of a number by its type in a safetensors file; those that are missing here take one byte."""
FLOATS = ("F64", "F32", "BF16", "F16")
"""Types that the engine converts to `engine.dtype`."""
HEADER_BYTES = 100_000_000
"""The longest header that safetensors itself reads."""


class _Tensor(msgspec.Struct):
    """What the header of a safetensors file says of one tensor."""

    dtype: str
    shape: tuple[NotNegative, ...]


def weight_bytes(model: Path, dtype: str) -> int:
    """Bytes of the weights as the engine holds them. 0 for a directory without safetensors files.

    UserError when one of the files cannot be read.
    """
    return sum(
        _tensor_bytes(tensor, dtype) for file in sorted(model.glob("*.safetensors")) for tensor in _tensors(file)
    )


def gpus_of(extra_args: Sequence[str]) -> tuple[int, int]:
    """GPUs that the engine uses, and how many of them share one copy of the weights."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", dest="tensor", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "--pp-size", dest="pipeline", type=int, default=1)
    parser.add_argument("--data-parallel-size", "--dp-size", dest="data", type=int, default=1)
    parser.add_argument("--enable-dp-attention", dest="shared", action="store_true")
    try:
        given, _ = parser.parse_known_args(list(extra_args))
    except argparse.ArgumentError as error:
        raise UserError(f"engine.extra_args = {list(extra_args)} cannot be read ({error}); correct it") from error
    copy = given.tensor * given.pipeline
    return copy * (1 if given.shared else given.data), copy


def _tensor_bytes(tensor: _Tensor, dtype: str) -> int:
    stored = STORED.get(tensor.dtype, 1)
    return math.prod(tensor.shape) * (SIZES.get(dtype, stored) if tensor.dtype in FLOATS else stored)


def _tensors(file: Path) -> list[_Tensor]:
    """The tensors that a file's header describes."""
    try:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = msgspec.json.decode(content.read(min(size, HEADER_BYTES)), type=dict[str, msgspec.Raw])
        return [msgspec.json.decode(tensor, type=_Tensor) for name, tensor in header.items() if name != "__metadata__"]
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise UserError(
            f"the weights {file} cannot be read as safetensors ({error}); download or export the model again"
        ) from error
