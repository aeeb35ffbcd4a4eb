"""Tells which of an agent's files would steer a verifier that did not ask for them, beside the tests and above them.

- What test runners read (harness/environment/protected_files.py), and project files with a section for pytest.
- `__init__.py` where the verifier's files lie, which the import of a test runs first; above them where it is new.
- Metadata of installed packages (`*.dist-info`, `*.egg-info`), whose entry points are plugins.
- New modules with the name of one that Python brings, the image has installed, or the verifier brings as a package:
  they would be imported instead.

Left out: what a verifier calls by name, as `make test` does. A task's `verifier.keep` lists exceptions.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path, PurePosixPath

from harness.environment.archive import Entry
from harness.environment.protected_files import RUNNERS, is_kept
from harness.tasks import Task

PROJECT_FILES = ("pyproject.toml", "tox.ini", "setup.cfg")
INI_SECTIONS = ("pytest", "tool:pytest")
LONGEST_KEY = 500
"""Dots in a line of TOML. The time that Python takes to read a key grows with the square of its parts."""
METADATA = re.compile(r".*\.(?:dist-info|egg-info|egg-link|egg)")
MODULE = re.compile(r"([A-Za-z_]\w*)(?:\.[\w-]+)*\.(?:py|pyc|so|pyd)")
OWN_NAMES = {"test", "this", "antigravity", "idlelib", "turtledemo", "setup"}
"""Names of Python's own that no verifier imports, or that projects use for themselves."""
LIST_MODULES = """
command -v python3 >/dev/null || exit 0
exec python3 -I -c 'import pkgutil; print(*{m.name for m in pkgutil.iter_modules()})' 2>/dev/null
"""
"""Shell command that prints the names of all modules that the image's Python finds; none where there is no Python."""


def places_of(task: Task) -> set[str]:
    """The directories of the working directory that hold the verifier's files or lie above them; `` is itself."""
    files = [PurePosixPath(path) for path in task.verifier.files if not path.startswith("~/")]
    directories = [PurePosixPath(path) for path in task.verifier.directories if not path.startswith(("~/", "/"))]
    return {"", *(_text(parent) for path in (*files, *directories) for parent in path.parents)}


def _text(path: PurePosixPath) -> str:
    return "" if str(path) == "." else str(path)


def _below(places: Collection[str], root: str) -> set[str]:
    """Those of the places that lie at or below the root, in relation to it."""
    inside = (PurePosixPath(place) for place in places if PurePosixPath(place).is_relative_to(root or "."))
    return {_text(place.relative_to(root or ".")) for place in inside}


def _brought(task: Task) -> set[str]:
    """The names of Python packages at the top of the directories that the verifier brings."""
    packages = (Path(source).glob("*/__init__.py") for source in task.verifier.directories.values())
    return {file.parent.name for files in packages for file in files}


def configures_pytest(name: str, content: bytes | None) -> bool:
    """Whether pytest would take its configuration from a project file. True also where that cannot be told."""
    if content is None:
        return True
    try:
        # What pytest's own readers take for lines: \r ends one, too.
        lines = content.decode().splitlines()
        if not name.endswith(".toml"):
            return any(line.partition("]")[0].lstrip(" \t\ufeff[") in INI_SECTIONS for line in lines if "[" in line)
        if any(line.count(".") > LONGEST_KEY for line in lines):
            return True
        tool = tomllib.loads(content.decode()).get("tool", {})
    except (ValueError, RecursionError):
        return True
    return not isinstance(tool, dict) or "pytest" in tool


class Steering:
    """Finds what would steer the verifier in one agent's working directory, or in a part of it."""

    def __init__(
        self,
        task: Task,
        root: str,
        before: Mapping[str, Entry],
        now: Mapping[str, Entry],
        modules: Callable[[], Collection[str]],
    ):
        """`root`: the working directory, or a directory below it, in relation to the working directory."""
        self._task, self._before, self._now = task, before, now
        beside = {_text(PurePosixPath(path).parent) for path in task.verifier.files}
        self._places, self._beside = _below(places_of(task), root), _below(beside, root)
        self._ask = modules
        self._installed: Collection[str] | None = None
        self._packages = {path.rpartition("/")[0] for path in now if path.rpartition("/")[2].startswith("__init__.")}
        self._brought = _brought(task)

    def paths(self, read: Callable[[str], bytes | None]) -> list[str]:
        """The topmost paths that would steer the verifier, whose state from before the agent counts instead.

        `read` gives a file of the agent's, None for one that is too long to be looked at.
        """
        either = sorted({*self._before, *self._now})
        steers = {path for path in either if self._differs(path) and self._steers(path, read)}
        return [path for path in sorted(steers) if not any(str(up) in steers for up in PurePosixPath(path).parents)]

    def _differs(self, path: str) -> bool:
        """Whether the agent changed what lies here, or may have changed what lies below."""
        entry = self._now.get(path)
        return entry != self._before.get(path) or (entry is not None and entry.kind == "directory")

    def _steers(self, path: str, read: Callable[[str], bytes | None]) -> bool:
        parent, _, name = path.rpartition("/")
        if self._makes_package(path):
            return True
        if parent not in self._places or not name or is_kept(self._task, f"/{path}"):
            return False
        new = path not in self._before
        entry = self._now.get(path) or Entry("file")
        if RUNNERS.fullmatch(name):
            return entry.kind != "directory" or new
        if METADATA.fullmatch(name):
            return new
        if re.fullmatch(r"__init__\.\w+", name):
            return new or parent in self._beside
        if name in PROJECT_FILES and path in self._now and entry.kind != "directory":
            return entry.kind == "link" or configures_pytest(name, read(path))
        return new and self._shadows(path, name, entry)

    def _makes_package(self, path: str) -> bool:
        """Whether this makes a package that shadows a module of a directory that was there before and was none."""
        directory, _, name = path.rpartition("/")
        parent, _, package = directory.rpartition("/")
        if not re.fullmatch(r"__init__\.\w+", name) or path in self._before or directory not in self._before:
            return False
        kept = is_kept(self._task, f"/{path}") or is_kept(self._task, f"/{directory}")
        return parent in self._places and not kept and self._is_module(package)

    def _shadows(self, path: str, name: str, entry: Entry) -> bool:
        """Whether Python would import this instead of an installed module. A directory without __init__ comes last."""
        if entry.kind != "directory":
            module = MODULE.fullmatch(name)
            if module is not None:
                return self._is_module(module[1])
            return entry.kind == "link" and self._is_module(name)  # to a directory, which Python imports as a package
        return path in self._packages and self._is_module(name)

    def _is_module(self, name: str) -> bool:
        if name in sys.stdlib_module_names or name in OWN_NAMES:
            return name not in OWN_NAMES
        if name in self._brought:
            return True
        if self._installed is None:
            self._installed = frozenset(self._ask())
        return name in self._installed
