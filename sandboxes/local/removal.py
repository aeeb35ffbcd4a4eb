"""Removes directories that sandboxes have written to, however deep they are and whatever modes they have.

A tree can be deeper than a path may be long, than Python may recurse, and than a process may hold open files. So a
directory below the top is emptied by moving its own directories up to the top first: two open directories are enough
for any depth. Nothing is opened through a link.

What cannot be removed all the same (a mount, an immutable file) is moved aside, so that it stands in nobody's way.
`sandboxes gc` tries it again.
"""

import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ASIDE = "not-removed"
"""Name of the directory for leftovers that cannot be removed, beside the sandboxes."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

log = logging.getLogger(__name__)


def remove(directory: Path) -> str:
    """Remove a directory. Accept that it is gone already.

    If some of it cannot be removed, move the rest aside, and log and return a sentence that says so.
    """
    try:
        parent = os.open(directory.parent, _DIRECTORY)
    except OSError:  # it is gone, with the directory that it was in
        return ""
    try:
        remove_below(parent, directory.name)
        return ""
    except OSError as error:
        where = directory if directory.parent.name == ASIDE else _moved_aside(directory)
        sentence = f"{where} cannot be removed ({error.strerror}: {error.filename}); remove it by hand"
        log.warning(sentence)
        return sentence
    finally:
        os.close(parent)


def leftovers(root: Path) -> Iterator[Path]:
    """Yield what was moved aside below `root`."""
    with suppress(FileNotFoundError, NotADirectoryError):
        yield from sorted((root / ASIDE).iterdir())


def remove_below(parent: int, name: str) -> None:
    """Remove what has this name in an open directory: a file, a link or a whole tree. Accept that it is not there.

    OSError, after everything else has been removed, for the first thing that cannot be removed.
    """
    try:
        if not _unlinked(parent, name):
            _Tree(parent, name).remove()
    except FileNotFoundError:
        return


class _Tree:
    """A directory that is being removed."""

    def __init__(self, parent: int, name: str):
        self._parent, self._name = parent, name
        self._top = _opened(parent, name)
        self._waiting: list[str] = []
        """Directories at the top that have not been emptied yet."""
        self._failed: OSError | None = None
        """The first error. What causes it stays, with the directories above it."""

    def remove(self) -> None:
        try:
            self._flatten(self._top)
            while self._waiting:
                self._remove_one(self._waiting.pop())
        finally:
            os.close(self._top)
        if self._failed is not None:
            raise self._failed
        os.rmdir(self._name, dir_fd=self._parent)

    def _remove_one(self, name: str) -> None:
        with self._noting():
            here = _opened(self._top, name)
            try:
                self._flatten(here)
            finally:
                os.close(here)
            os.rmdir(name, dir_fd=self._top)

    def _flatten(self, here: int) -> None:
        """Remove a directory's files, and move its directories to the top."""
        for name in os.listdir(here):
            with self._noting():
                if _unlinked(here, name):
                    continue
                moved = name
                if here != self._top:
                    os.close(_opened(here, name))  # moving a directory takes the permission to write to it
                    moved = secrets.token_hex(8)
                    os.rename(name, moved, src_dir_fd=here, dst_dir_fd=self._top)
                self._waiting.append(moved)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            pass
        except OSError as error:
            self._failed = self._failed or error


def _unlinked(parent: int, name: str) -> bool:
    """Remove a file or a link. False for a directory."""
    if stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        return False
    os.unlink(name, dir_fd=parent)
    return True


def _opened(parent: int, name: str) -> int:
    """Open a directory after taking every permission on it. Its mode may forbid that, so it is set by a path to it."""
    at = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        with suppress(PermissionError):  # not ours: what it forbids fails where it is done
            os.chmod(f"/proc/self/fd/{at}", 0o700)
        return os.open(name, _DIRECTORY, dir_fd=parent)
    finally:
        os.close(at)


def _moved_aside(directory: Path) -> Path:
    """Move a directory beside the sandboxes, and return where it is now."""
    aside = directory.parent / ASIDE
    try:
        aside.mkdir(mode=0o700, exist_ok=True)
        return directory.rename(aside / f"{directory.name}-{secrets.token_hex(4)}")
    except OSError:
        return directory
