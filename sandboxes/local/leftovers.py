"""Lists sandboxes of this machine and removes those of dead owners.

A sandbox's id holds its owner's pid and start time, which tell whether the owner lives.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sandboxes.local import memory_group
from sandboxes.local.process import SANDBOX_ID, default_root, is_our_directory
from sandboxes.local.processes import Process, kill, namespace, processes_of, start_of, table
from sandboxes.local.removal import leftovers, remove


@dataclass(frozen=True)
class ListedSandbox:
    """A sandbox on this machine: its directory, or processes that carry its id, or both."""

    id: str
    owner: int
    orphaned: bool
    """Whether its owner is dead, so that nobody will stop it."""
    processes: int
    directory: Path


def list_sandboxes(root: Path | None = None) -> list[ListedSandbox]:
    """Return every sandbox on this machine that we may see."""
    root = root or default_root()
    processes = table()
    ids = {path.name for path in root.iterdir()} if is_our_directory(root) else set()
    here = namespace()  # in another namespace, the same pid is another process
    ids |= {process.sandbox for process in processes if process.sandbox and namespace(process.pid) == here}
    return list(_described(sorted(ids), processes, root))


def _described(ids: list[str], processes: list[Process], root: Path) -> Iterator[ListedSandbox]:
    for sandbox in ids:
        ours = SANDBOX_ID.fullmatch(sandbox)  # anybody's process may name another, which may lead anywhere
        if ours:
            owner, started = map(int, ours.groups())
            alive = start_of(owner) == started
            yield ListedSandbox(sandbox, owner, not alive, len(processes_of(processes, sandbox)), root / sandbox)


def remove_orphans(root: Path | None = None, tell: Callable[[str], object] = lambda _: None) -> list[ListedSandbox]:
    """End and remove the sandboxes of dead owners, and return them.

    `tell`: called with a sentence for each directory that cannot be removed. It is moved aside, and tried again by each
    later call.
    """
    if is_our_directory(root or default_root()):
        for leftover in leftovers(root or default_root()):
            if sentence := remove(leftover):
                tell(sentence)
    orphans = [sandbox for sandbox in list_sandboxes(root) if sandbox.orphaned]
    for sandbox in orphans:
        for _ in range(1000):
            if not any(kill(sandbox.id)):
                break
            time.sleep(0.005)
    for group in memory_group.left_by([sandbox.id for sandbox in orphans]):
        group.remove()
    for sandbox in orphans:
        if sandbox.directory.exists() and (sentence := remove(sandbox.directory)):
            tell(sentence)
    return orphans
