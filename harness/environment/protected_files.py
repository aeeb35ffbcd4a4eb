"""Lists the files that steer a verifier without being named by it: those that test runners, shells and Python read.

- In the working directory and above it and the verifier's files: conftest.py, pytest.ini, pytest.toml, modules with the
  name of a test runner (pytest, unittest, ...), sitecustomize.py, *.pth.
- In the home, when the verifier shares it (user root): start files of shells, git, pip, npm, curl, Python.
- In a root that can be written (profile harbor): /etc/ld.so.preload, start files below /etc, crontabs, sitecustomize.py
  and *.pth where Python looks.

Left out: files that a verifier names itself (its interpreter, the project's own pyproject.toml, Makefile,
package.json), and .pth files with the names that editable installs use.
"""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

from harness.tasks import Task
from sandboxes.base import Sandbox, Spec

RUNNERS = re.compile(
    r"(?:conftest|sitecustomize|usercustomize|pytest|_pytest|pluggy|unittest|doctest)\.(?:py|so|pyc)"
    r"|\.?pytest\.(?:ini|toml)|_?pytest|pluggy|unittest|doctest|.*\.pth"
)
RUNNERS_NAMES = ("*conftest*", "*customize*", "*pytest*", "*pluggy*", "*unittest*", "*doctest*", "*.pth")
"""The same as somewhat wider shell patterns, for the files that a manifest lists first."""
HOME = re.compile(
    r"\.(?:bashrc|bash_profile|bash_login|bash_aliases|bash_logout|profile|zshrc|zshenv|zprofile|gitconfig|pythonrc.*)"
    r"|\.(?:curlrc|wgetrc|npmrc|pydistutils\.cfg|config/(?:git|pip|fish|uv)/.*|pip/.*)"
)
SYSTEM = re.compile(
    r"/etc/(?:ld\.so\.preload|profile|profile\.d/.*|bash\.bashrc|bash_completion\.d/.*|environment|zsh.*|gitconfig)"
    r"|/etc/(?:pip\.conf|curlrc|wgetrc|npmrc|cron.*|anacrontab|python3?(?:\.\d+)?/.*|sudoers.*|pam\.d/.*)"
    r"|/var/spool/(?:cron|at)/.*"
)
PYTHON = re.compile(
    r".*/(?:site|dist)-packages/(?:(?:site|user)customize(?:\.py|/.*)|[^/]+\.pth)|.*/(?:site|user)customize\.py"
)
TOOLS = re.compile(
    r"(?:/usr(?:/local)?)?/s?bin(?:/.*)?|(?:/usr(?:/local)?)?/lib(?:32|64|x32)?(?:/(?:.*\.so[.\d]*|python3[^/]*(?:/.*)?))?"
)
PACKAGES = re.compile(r"/(?:site|dist)-packages/|/__pycache__/|/EXTERNALLY-MANAGED$")
"""Packages are not restored: an agent may reinstall one, and half of an old version would be no package at all."""
INSTALLERS = re.compile(r".*/(?:__editable__[^/]*|distutils-precedence|easy-install)\.pth")


def is_tool(path: str) -> bool:
    """Whether a file of the image is a program, library or module that any verifier may run."""
    return bool(TOOLS.fullmatch(path)) and not PACKAGES.search(path)


def is_kept(task: Task, path: str) -> bool:
    """Whether the task allows the agent to create or change this path."""
    return any(matches(path, pattern) for pattern in task.verifier.keep)


def steering(task: Task, sandbox: Sandbox, spec: Spec, own_root: bool) -> Callable[[str], bool]:
    """Return a test for paths that steer the verifier of a task in the agent's own sandbox.

    Paths that the task allows the agent to change are none.
    """
    above = above_tests(task, sandbox.work, own_root)
    shared_home = task.verifier.user == "root"
    writable_root = own_root and spec.profile == "harbor"

    def steers(path: str) -> bool:
        parent, _, name = path.rpartition("/")
        if INSTALLERS.fullmatch(path) or is_kept(task, path):
            return False
        if (parent or "/") in above and RUNNERS.fullmatch(name):
            return True
        if shared_home and path.startswith(f"{sandbox.home}/"):
            return bool(HOME.fullmatch(path[len(sandbox.home) + 1 :]) or PYTHON.fullmatch(path))
        return writable_root and bool(SYSTEM.fullmatch(path) or PYTHON.fullmatch(path))

    return steers


def above_tests(task: Task, work: str, own_root: bool) -> set[str]:
    """The working directory, and the directories at and above the verifier's files in it."""
    above = {work}
    if own_root:
        above.update(map(str, PurePosixPath(work).parents))
    for path in task.verifier.files:
        if not path.startswith("~/"):
            above.update(str(PurePosixPath(work, parent)) for parent in PurePosixPath(path).parents)
    return above


def matches(path: str, pattern: str) -> bool:
    """Whether a pattern (absolute, or the end of a path) names a path or a directory above it."""
    full = pattern if pattern.startswith("/") else f"*/{pattern}"
    return fnmatchcase(path, full) or fnmatchcase(path, f"{full}/*")
