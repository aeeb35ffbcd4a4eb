"""`sandboxes ls` lists our sandboxes and Docker resources. `sandboxes gc` removes those of dead owners only."""

import argparse
import sys
from collections import Counter
from pathlib import Path

from sandboxes.docker.leftovers import DockerResource
from sandboxes.gc import SearchScope, list_all, remove_leftovers
from sandboxes.local.process import default_root


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return 1 when a daemon did not answer or a directory stays."""
    parser = argparse.ArgumentParser(prog="sandboxes", description=__doc__)
    parser.add_argument("verb", choices=("ls", "gc"))
    parser.add_argument(
        "--root", type=Path, default=default_root(), help="directory of the sandboxes without Docker (%(default)s)"
    )
    parser.add_argument(
        "--docker",
        action="append",
        metavar="ADDRESS",
        help="a Docker daemon, may be repeated (DOCKER_HOST, the Docker context in use, or the local one)",
    )
    parser.add_argument("--bundles", action="store_true", help="gc: also agents' bundles that no container uses")
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="NAME",
        help="gc: also what this host left; name only a host that is down",
    )
    given = parser.parse_args(argv)
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
        print(f"error: {trouble}", file=sys.stderr)
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
