"""`sandboxes ls`: what runs on this machine. `sandboxes gc`: end and remove what dead owners left."""

import argparse
from pathlib import Path

from sandboxes.leftovers import Found, collect, found
from sandboxes.process import default_root


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="sandboxes", description=__doc__)
    parser.add_argument("verb", choices=("ls", "gc"))
    parser.add_argument("--root", type=Path, default=default_root(), help="where the sandboxes are (%(default)s)")
    given = parser.parse_args(argv)
    if given.verb == "ls":
        for sandbox in found(given.root):
            print(_line(sandbox))
        return 0
    removed = collect(given.root)
    print(f"removed {len(removed)} sandboxes of dead owners, with {sum(s.processes for s in removed)} processes")
    return 0


def _line(sandbox: Found) -> str:
    state = f"orphaned, its owner {sandbox.owner} is dead" if sandbox.orphaned else f"in use by process {sandbox.owner}"
    return f"{sandbox.id}  {sandbox.processes} processes  {state}  {sandbox.directory}"
