"""`sandboxes ls` lists our sandboxes and Docker resources. `sandboxes gc` removes those of dead owners only."""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import shtab

from sandboxes.docker.leftovers import DockerResource
from sandboxes.gc import SearchScope, list_all, remove_leftovers
from sandboxes.local.process import default_root

ROOT = "directory of the sandboxes without Docker (%(default)s)"
PAGE = "(see docs/sandboxes.md)"
"""Ends each error, as proxy/pool/terminal/errors.py ends those of the other commands."""
DAEMONS = "a Docker daemon, may be repeated (DOCKER_HOST, the Docker context in use, or the local one)"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = _Parser(prog="sandboxes", description=__doc__)
    top.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version and exit")
    shtab.add_argument_to(top, help="print a script that completes this command's words in a shell")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    listed = verbs.add_parser(
        "ls", help="list our sandboxes and Docker resources, with their owners", epilog="example: sandboxes ls"
    )
    removed = verbs.add_parser(
        "gc", help="remove those whose owner is dead", epilog="example: sandboxes gc --host old-machine"
    )
    for verb in (listed, removed):
        verb.add_argument("--root", type=Path, default=default_root(), help=ROOT)
        verb.add_argument("--docker", action="append", metavar="ADDRESS", help=DAEMONS)
    removed.add_argument("--bundles", action="store_true", help="also agents' bundles that no container uses")
    removed.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="also what this host left; name only one that is down",
    )
    return top


class _Parser(argparse.ArgumentParser):
    """Ends the help with the examples of all verbs, and errors with the page."""

    def format_help(self) -> str:
        groups = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
        lines = [f"  {(verb.epilog or '').removeprefix('example: ')}" for group in groups for verb in group.values()]
        return super().format_help() + "\n".join(["\nexamples:", *lines, ""] if lines else [])

    def error(self, message: str) -> NoReturn:
        super().error(f"{message} {PAGE}")


class _ShowVersion(argparse.Action):
    """Prints the installed version. The packages that could say it for all import this one, or are not imported."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version  # only this option needs it

        print(f"blackforge {version('blackforge')}")
        parser.exit(0)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return 1 when a daemon did not answer or something stays."""
    given = parser().parse_args(argv)
    where = SearchScope(daemons=given.docker, root=given.root)
    if given.verb == "ls":
        seen = list_all(where)
        for sandbox in seen.sandboxes:
            owner = sandbox.owner
            state = f"orphaned, its owner {owner} is dead" if sandbox.orphaned else f"in use by process {owner}"
            print(f"{sandbox.id}  {sandbox.processes} processes  {state}  {sandbox.directory}")
        for resource in seen.resources:
            print(_resource_line(resource))
    else:
        seen = remove_leftovers(where, dead_hosts=given.host, bundles=given.bundles)
        processes = sum(sandbox.processes for sandbox in seen.sandboxes)
        removed = [f"{len(seen.sandboxes)} sandboxes of dead owners, with {processes} processes"]
        counts = Counter((thing.kind, thing.daemon) for thing in seen.resources)
        removed += [f"{number} {kind}s on {daemon}" for (kind, daemon), number in counts.items()]
        print(f"removed {'; '.join(removed)}")
    for shim in seen.shims:
        print(shim)
    for trouble in seen.troubles:
        print(f"error: {trouble} {PAGE}", file=sys.stderr)
    return 1 if seen.troubles else 0


def _resource_line(thing: DockerResource) -> str:
    pid, host = thing.owner.pid, thing.owner.host
    states = {
        True: f"in use by process {pid}",
        False: f"orphaned, its owner {pid} is dead",
        None: f"of process {pid} on {host}, which cannot be checked from here",
    }
    state = "shared" if thing.shared else states[thing.alive]
    run = f"  run {thing.run}" if thing.run else ""
    return f"{thing.name}  {thing.kind}, {thing.purpose}{run}  {state}  {thing.daemon}"
