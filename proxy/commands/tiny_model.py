"""The command `proxy tiny-model`: a model that is small enough to try everything on a CPU."""

import argparse
from pathlib import Path

from proxy.engine.tiny_model import make_tiny_model


def add_arguments(tiny: argparse.ArgumentParser) -> None:
    """Add the arguments of `proxy tiny-model`."""
    tiny.add_argument("directory", type=Path)
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=_make)


def _make(arguments: argparse.Namespace) -> int:
    make_tiny_model(arguments.directory, arguments.seed)
    print(f"model: {arguments.directory}")
    return 0
