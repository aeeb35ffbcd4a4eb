"""Run one stage in this process: `python -m benchmarks.gpu_stages.worker STAGE FILE`.

FILE has the figures that are known so far, so that a stage that is killed keeps them. The directory beside it, with its
name, is the stage's own; whoever starts the stage deletes it.
"""

import argparse
import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def write(file: Path, figures: dict[str, Any]) -> None:
    """Replace the file at once, so that whoever reads it finds whole JSON."""
    new = file.with_suffix(".new")
    new.write_text(json.dumps(figures))
    os.replace(new, file)


def run(name: str, file: Path, small: bool, directory: Path) -> bool:
    """Write the figures of a stage as they come. False when it failed."""
    figures: dict[str, Any] = {"ended": "whole"}
    try:
        from benchmarks.gpu_stages.scene import make_scene  # torch, or NumPy, may be missing

        scene = make_scene(small, directory)
        figures |= {"machine": scene.machine, "sizes": "small" if scene.small else "full"}
        write(file, figures)
        for part in importlib.import_module(f"benchmarks.gpu_stages.{name}").figures(scene):
            figures |= part
            write(file, figures)
        if scene.lacking:
            figures |= {"ended": "lacks a part", "lacks": "; ".join(dict.fromkeys(scene.lacking))}
        if scene.errors:
            figures["ended"] = "failed"
    except ImportError as error:
        figures |= {"ended": "lacks a part", "lacks": str(error)}
    except Exception as error:  # also what torch and Triton raise; the figures so far are worth having
        traceback.print_exc()
        figures |= {"ended": "failed", "error": f"{type(error).__name__}: {error}"[:2000]}
    write(file, figures)
    return figures["ended"] != "failed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage")
    parser.add_argument("file", type=Path)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    directory: Path = options.file.with_suffix("")
    directory.mkdir()
    return 0 if run(options.stage, options.file, options.small, directory) else 1


if __name__ == "__main__":
    sys.exit(main())
