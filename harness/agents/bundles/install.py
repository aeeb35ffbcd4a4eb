"""Installs agents from their registries at pinned versions, each as a bundle in a directory below $BLACKFORGE_AGENTS.

A bundle contains no paths of this machine, so that a sandbox can mount it at another path.
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
from harness.tasks.schema import McpServer
from proxy.pool.errors import UserError
from proxy.pool.rollouts.prompt_variations import NAMES, PromptKind
from sandboxes.bundles import AGENTS, NODE, PYTHON, read_manifest, seal_bundle

PACKAGES = Path("packages")
"""Directory of a Python agent's packages in its bundle, with a `__main__` that starts it."""

_INTERPRETER = str(Path(sys.executable).resolve())
"""For processes of this machine: the Python below our virtual environment, since an agent brings its own packages."""

START_SECONDS = 300
"""How long an agent may take to show its help, on a busy machine and from a cold disk."""


def agents_directory() -> Path:
    """The directory of installed agents: $BLACKFORGE_AGENTS, or a cache directory of the user."""
    return Path(os.environ.get("BLACKFORGE_AGENTS") or Path.home() / ".cache" / "blackforge" / "bundles").absolute()


@dataclass(frozen=True)
class Package:
    """A bundle with its name and version."""

    name: str
    version: str
    program: Path
    """The program to start, relative to the bundle's directory."""
    runs_on: Literal["itself", "python", "node"]

    @property
    def directory(self) -> Path:
        return agents_directory() / self.name

    def installed_version(self) -> str | None:
        """The installed version. None when there is none, or when an installation was interrupted."""
        manifest = read_manifest(self.directory)
        return manifest.version if manifest else None

    def check(self) -> None:
        """Check that this version is installed. UserError with the command that installs it when it is not."""
        installed = self.installed_version()
        if installed != self.version:
            state = "is not installed" if installed is None else f"is installed as {installed}, not {self.version},"
            raise UserError(f"{self.name} {state} in {self.directory}; run: harness agents install {self.name}")

    def command(self, bundle: Bundle) -> list[str]:
        """The command that starts it from a mounted bundle."""
        program = f"{bundle.directory}/{self.program}"
        # -I keeps the task's PYTHONPATH from the agent, and the agent's packages from the programs that it runs
        runners = {"itself": [], "python": [bundle.python, "-I"], "node": [bundle.node]}
        return [*runners[self.runs_on], program]

    def install(self, fill: Callable[[Path], None], *, here: bool = True) -> None:
        """Make the bundle from scratch with `fill`. `here`: check that it starts on this machine."""
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
            return subprocess.run(command, capture_output=True, timeout=START_SECONDS).returncode == 0
        except (OSError, subprocess.TimeoutExpired):
            return False


class FromRegistry(ABC):
    """An adapter for an agent that is installed as a bundle: from a registry, or from this project's own files."""

    name: str
    mcp: frozenset[str]
    """How it speaks with MCP servers (harness/agents/base.py)."""
    package: Package
    """The bundle to install."""
    fixed: frozenset[PromptKind] = NAMES
    """Most agents' own prompts speak of their tools by name."""

    @property
    def bundle(self) -> str:
        return self.package.name

    def check(self) -> None:
        self.package.check()

    @abstractmethod
    def install(self) -> None:
        """Install the package's version. UserError when that fails."""

    @abstractmethod
    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch: ...


def bundle_at(root: str, name: str) -> Bundle:
    """The bundle of this name, where `root` is the directory of all bundles as a sandbox sees it."""
    if root == AGENTS:
        return Bundle(f"{root}/{name}", PYTHON, NODE)
    return Bundle(f"{root}/{name}", _INTERPRETER, shutil.which("node") or "node")


def pip_install(package: Package, requirements: Sequence[str], main: str, beside: Path | None = None) -> None:
    """Install Python packages.

    `main` is the text of the module that starts the agent, `beside` the directory of a package of ours that it imports.
    """

    def fill(directory: Path) -> None:
        packages = directory / PACKAGES
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-compile"]
        run([*pip, "--target", str(packages), *requirements], package.name)
        shutil.rmtree(packages / "bin", ignore_errors=True)  # scripts that name this machine's interpreter
        (packages / "__main__.py").write_text(main)
        if beside is not None:
            shutil.copytree(beside, packages / beside.name, ignore=shutil.ignore_patterns("__pycache__"))
        compile_python(packages)

    package.install(fill)


def compile_python(directory: Path) -> None:
    """Write byte code that stays valid wherever the files are copied: a read-only bundle gets none later."""
    how = [
        "-q",
        "-j0",
        "--invalidation-mode",
        "unchecked-hash",
        "-s",
        str(directory),
    ]  # -s removes this machine's paths
    command = [sys.executable, "-m", "compileall", *how, str(directory)]
    subprocess.run(
        command, stdout=subprocess.DEVNULL
    )  # fails for some packages, which contain files that are no valid Python


def npm_install(package: Package, npm_name: str, *, native: str = "", without: str = "") -> None:
    """Install an npm package with its own install script, but not those of its dependencies.

    `native`: pattern of the program that its launcher would start, so that it can be started directly. `without`:
    pattern of directories that are not needed to run it.
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
    """Find npm. UserError when it is not on PATH."""
    program = shutil.which("npm")
    if program is None:
        raise UserError(f"npm is not on PATH, and {name} comes from the npm registry; install Node.js and npm")
    return program


def run(command: Sequence[str | Path], name: str, cwd: Path | None = None) -> str:
    """Run a step of an installation and return its output. UserError when it fails."""
    result = subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        tail = " | ".join(result.stdout.strip().splitlines()[-3:])
        raise UserError(f"{name} could not be installed ({tail}); repeat: harness agents install {name}")
    return result.stdout
