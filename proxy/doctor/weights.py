"""How much memory a model's weights take in an engine, and over how many GPUs the engine divides them."""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from proxy.pool.errors import UserError

SIZES = {"float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2}
"""Bytes of a number by `engine.dtype`. "auto" keeps the file's."""
STORED = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I64": 8, "I32": 4, "I16": 2}
"""Bytes of a number by its type in a safetensors file; those that are missing here take one byte."""
FLOATS = ("F64", "F32", "BF16", "F16")
"""Types that the engine converts to `engine.dtype`."""


def weight_bytes(model: Path, dtype: str) -> int:
    """Bytes of the weights as the engine holds them. 0 for a directory without safetensors files."""
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


def _tensor_bytes(tensor: dict[str, Any], dtype: str) -> int:
    stored = tensor["dtype"]
    size = SIZES.get(dtype, STORED.get(stored, 1)) if stored in FLOATS else STORED.get(stored, 1)
    return math.prod(tensor["shape"]) * size


def _tensors(file: Path) -> Iterator[dict[str, Any]]:
    """The tensors that a file's header describes."""
    with file.open("rb") as content:
        header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
    yield from (tensor for name, tensor in header.items() if name != "__metadata__")
