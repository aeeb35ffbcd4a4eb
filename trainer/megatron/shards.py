"""Write a stream of tensors into safetensors files: one file, or several with an index in Hugging Face's format.

Never holds more tensors than one file has. Left out: reading (trainer/megatron/weights.py).
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from proxy.pool.errors import UserError

FILE_BYTES = 4 * 2**30


def write_tensors(directory: Path, tensors: Iterable[tuple[str, Tensor]], limit: int = FILE_BYTES) -> None:
    """Write tensors into files of at most `limit` bytes; a larger tensor gets a file of its own.

    UserError when the disk is full.
    """
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        if pending and size + tensor.nbytes > limit:
            files.append(_write(directory, pending, len(files)))
            pending, size = {}, 0
        pending[name] = tensor
        size, total = size + tensor.nbytes, total + tensor.nbytes
    files.append(_write(directory, pending, len(files)))
    _rename_and_index(directory, files, total)


def _write(directory: Path, tensors: dict[str, Tensor], number: int) -> list[str]:
    """Write one file under a temporary name; returns the names of its tensors."""
    file = directory / f"{number}.safetensors"
    try:
        save_file(tensors, os.fspath(file), metadata={"format": "pt"})
    except SafetensorError as error:  # which the library raises for a full disk, too
        raise UserError(f"{file} could not be written ({error}); make room on its disk and start again") from error
    return list(tensors)


def _rename_and_index(directory: Path, files: list[list[str]], total: int) -> None:
    """Give the files their final names, which contain the number of files, and write the index."""
    if len(files) == 1:
        os.rename(directory / "0.safetensors", directory / "model.safetensors")
        return
    file_of_tensor: dict[str, str] = {}
    for number, names in enumerate(files):
        file = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        os.rename(directory / f"{number}.safetensors", directory / file)
        file_of_tensor |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": file_of_tensor}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
