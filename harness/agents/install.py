"""Agents from their registries, at pinned versions: each a bundle in a directory of its own below $BLACKFORGE_AGENTS.

Nothing in a bundle knows where it lies, so that a sandbox can have it at another path.
"""

import os
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from harness.agents.base import Bundle, Endpoint, Launch
from proxy.pool.errors import UserError
from sandboxes.bundles import AGENTS, NODE, PYTHON, read_manifest, seal_bundle

PACKAGES = Path("packages")
"""Where a Python agent's packages lie in its bundle, with a `__main__` that starts it."""


def agents_directory() -> Path:
    """Where agents are installed: $BLACKFORGE_AGENTS, or a cache directory of the user."""
    return Path(os.environ.get("BLACKFORGE_AGENTS") or Path.home() / ".cache" / "blackforge" / "bundles").absolute()


@dataclass(frozen=True)
class Package:
    """A bundle of a name and version."""

    name: str
    version: str
    program: Path
    """Relative to its directory."""
    runs_on: Literal["itself", "python", "node"]

    @property
    def directory(self) -> Path:
        return agents_directory() / self.name

    def installed_version(self) -> str | None:
        """The version that stands there, None when there is none or an installation was broken off."""
        manifest = read_manifest(self.directory)
        return manifest.version if manifest else None

    def check(self) -> None:
        """UserError with the way to get it when it is missing or of another version."""
        found = self.installed_version()
        if found != self.version:
            state = "is not installed" if found is None else f"is installed as {found}, not {self.version},"
            raise UserError(f"{self.name} {state} in {self.directory}; run: harness agents install {self.name}")

    def command(self, bundle: Bundle) -> list[str]:
        """The words that start it where its bundle is mounted."""
        program = f"{bundle.directory}/{self.program}"
        # -I: the task's PYTHONPATH is not the agent's, and its packages stay unseen by what it runs
        runners = {"itself": [], "python": [bundle.python, "-I"], "node": [bundle.node]}
        return [*runners[self.runs_on], program]

    def install(self, fill: Callable[[Path], None], *, here: bool = True) -> None:
        """Make the bundle afresh, and if it is meant to start here too, see that it does."""
        if self.directory.is_symlink():
            self.directory.unlink()
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        fill(self.directory)
        if here and not self.starts():
            raise UserError(f"{self.name} {self.version} was installed but does not start; see {self.directory}")
        seal_bundle(self.directory, self.name, self.version)

    def starts(self) -> bool:
        try:
            command = [*self.command(bundle_at(str(agents_directory()), self.name)), "--help"]
            return subprocess.run(command, capture_output=True, timeout=120).returncode == 0
        except OSError:
            return False


class FromRegistry(ABC):
    """An adapter of an agent that comes from a registry."""

    name: str
    package: Package
    """What is installed, and in which version."""

    @property
    def bundle(self) -> str:
        return self.package.name

    def check(self) -> None:
        self.package.check()

    @abstractmethod
    def install(self) -> None:
        """Fetch that version; UserError when it cannot be had."""

    @abstractmethod
    def launch(self, endpoint: Endpoint, bundle: Bundle) -> Launch: ...


def bundle_at(root: str, name: str) -> Bundle:
    """The bundle of this name where the bundles of a sandbox are."""
    if root == AGENTS:
        return Bundle(f"{root}/{name}", PYTHON, NODE)
    # its processes see this machine's files; not our environment's Python, since an agent brings all it needs along
    return Bundle(f"{root}/{name}", str(Path(sys.executable).resolve()), shutil.which("node") or "node")


def pip_install(package: Package, requirements: Sequence[str], main: str) -> None:
    """Install Python packages; `main` is the text of the module that starts the agent."""

    def fill(directory: Path) -> None:
        packages = directory / PACKAGES
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile"]
        run([*pip, "--target", str(packages), *requirements], package.name)
        shutil.rmtree(packages / "bin", ignore_errors=True)  # scripts that name this machine's interpreter
        (packages / "__main__.py").write_text(main)
        compile_python(packages)

    package.install(fill)


def compile_python(directory: Path) -> None:
    """Write byte code that counts wherever the files are copied to; read-only bundles get none later."""
    how = ["-q", "-j0", "--invalidation-mode", "unchecked-hash", "-s", str(directory)]  # without this machine's paths
    command = [sys.executable, "-m", "compileall", *how, str(directory)]
    subprocess.run(command, stdout=subprocess.DEVNULL)  # packages carry files that are no valid Python


def npm_install(package: Package, npm_name: str, *, native: str = "", without: str = "") -> None:
    """Install an npm package, with its own install script and nobody else's.

    `native` is a pattern for the program that its launcher starts, which then is started directly; `without` one for
    directories that are not needed to run it.
    """

    def fill(directory: Path) -> None:
        (directory / "package.json").write_text("{}\n")
        command = npm(package.name)
        run([command, "install", "--no-audit", "--no-fund", f"{npm_name}@{package.version}"], package.name, directory)
        for program in directory.glob(native) if native else ():
            (directory / package.program).symlink_to(program.relative_to(directory))
        if not (directory / package.program).exists() or not package.starts():
            # npm 11 runs no install script that was not approved
            run([command, "install-scripts", "approve", npm_name], package.name, directory)
            run([command, "rebuild"], package.name, directory)
        for unneeded in directory.glob(without) if without else ():
            shutil.rmtree(unneeded)

    package.install(fill)


def npm(name: str) -> str:
    """The program; UserError when there is none."""
    found = shutil.which("npm")
    if found is None:
        raise UserError(f"npm is not on PATH, and {name} comes from the npm registry; install Node.js and npm")
    return found


def run(command: Sequence[str | Path], name: str, cwd: Path | None = None) -> str:
    """The output of a step of an installation; UserError when it fails."""
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        tail = " | ".join(done.stdout.strip().splitlines()[-3:])
        raise UserError(f"{name} could not be installed ({tail}); repeat: harness agents install {name}")
    return done.stdout
