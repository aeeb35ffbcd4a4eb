"""Agents from their registries, at pinned versions, each in a directory of its own below $BLACKFORGE_AGENTS.

A directory counts as installed once its version file is written, which is the last step.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from harness.agents.base import Agent
from proxy.pool.errors import UserError

VERSION_FILE = "blackforge-version"


def agents_directory() -> Path:
    """Where agents are installed: $BLACKFORGE_AGENTS, or a cache directory of the user."""
    return Path(os.environ.get("BLACKFORGE_AGENTS") or Path.home() / ".cache" / "blackforge" / "agents").absolute()


@dataclass(frozen=True)
class Package:
    """An agent as installed."""

    name: str
    version: str
    executable: Path
    """Relative to its directory."""

    @property
    def directory(self) -> Path:
        return agents_directory() / self.name

    def installed_version(self) -> str | None:
        """The version that stands there, None when there is none or an installation was broken off."""
        version = self.directory / VERSION_FILE
        return (
            version.read_text().strip() if version.is_file() and (self.directory / self.executable).exists() else None
        )

    def binary(self) -> Path:
        """The executable; UserError with the way to get it when it is missing or of another version."""
        found = self.installed_version()
        if found != self.version:
            state = "is not installed" if found is None else f"is installed as {found}, not {self.version},"
            raise UserError(
                f"the agent {self.name} {state} in {self.directory}; run: harness agents install {self.name}"
            )
        return self.directory / self.executable


class Installable(Agent, Protocol):
    """An adapter of an agent that comes from a registry."""

    @property
    def package(self) -> Package:
        """Where it stands and in which version."""

    def install(self) -> None:
        """Fetch that version; UserError when it cannot be had."""


def pip_install(package: Package, requirements: Sequence[str]) -> None:
    """Install Python packages into a virtual environment of the agent's own."""
    _start_afresh(package)
    _run([sys.executable, "-m", "venv", str(package.directory)], package)
    _run([str(package.directory / "bin/python"), "-m", "pip", "install", "-q", *requirements], package)
    _finish(package)


def npm_install(package: Package, npm_name: str) -> None:
    """Install an npm package, with its own install script and nobody else's."""
    npm = shutil.which("npm")
    if npm is None:
        raise UserError(f"npm is not on PATH, and {package.name} comes from the npm registry; install Node.js and npm")
    _start_afresh(package)
    package.directory.mkdir(parents=True)
    (package.directory / "package.json").write_text("{}\n")
    _run([npm, "install", "--no-audit", "--no-fund", f"{npm_name}@{package.version}"], package)
    if not _starts(package):  # npm 11 runs no install script that was not approved
        _run([npm, "install-scripts", "approve", npm_name], package)
        _run([npm, "rebuild"], package)
    _finish(package)


def _start_afresh(package: Package) -> None:
    if package.directory.is_symlink():
        package.directory.unlink()
    shutil.rmtree(package.directory, ignore_errors=True)


def _finish(package: Package) -> None:
    if not _starts(package):
        raise UserError(f"{package.name} {package.version} was installed but does not start; see {package.directory}")
    (package.directory / VERSION_FILE).write_text(f"{package.version}\n")


def _starts(package: Package) -> bool:
    try:
        found = subprocess.run([package.directory / package.executable, "--help"], capture_output=True, timeout=120)
    except OSError:
        return False
    return found.returncode == 0


def _run(command: Sequence[str], package: Package) -> None:
    cwd = package.directory if package.directory.is_dir() else None
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        tail = " | ".join(done.stdout.strip().splitlines()[-3:])
        raise UserError(
            f"{package.name} could not be installed ({tail}); repeat: harness agents install {package.name}"
        )
