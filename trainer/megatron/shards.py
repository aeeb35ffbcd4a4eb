"""Safetensors files from a stream of tensors: one file, or several of bounded size with an index, as Hugging Face does.

Holds no more than one file's tensors. Left out: reading (trainer/megatron/weights.py).
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from proxy.pool.errors import UserError

FILE_BYTES = 4 * 2**30


def write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]], limit: int = FILE_BYTES) -> torch.dtype:
    """Write tensors into files of at most `limit` bytes (one tensor may be more). Returns their common dtype."""
    files: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > limit:
            files.append(_write(directory, held, len(files)))
            held, size = {}, 0
        held[name] = tensor
        size, total, dtype = size + tensor.nbytes, total + tensor.nbytes, tensor.dtype
    files.append(_write(directory, held, len(files)))
    _name(directory, files, total)
    return dtype


def _write(directory: Path, held: dict[str, Tensor], number: int) -> list[str]:
    file = directory / f"{number}.safetensors"
    try:
        save_file(held, os.fspath(file), metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk is no OSError to this library
        raise UserError(f"{file} could not be written ({error}); see that its disk has room and start again") from error
    return list(held)


def _name(directory: Path, files: list[list[str]], total: int) -> None:
    """Their names tell how many there are, which is known at the end."""
    if len(files) == 1:
        os.rename(directory / "0.safetensors", directory / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        os.rename(directory / f"{number}.safetensors", directory / file)
        where |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
