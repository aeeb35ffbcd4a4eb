"""Makes the environment of an SDK or framework: the exact versions of a file in requirements/, once per machine.

`python -m tests.proxy.sdks.environments NAME...` makes those of these names, and without names all of them.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).parent / "requirements"
NAMES = sorted(file.stem for file in REQUIREMENTS.glob("*.txt"))


def directory_of(name: str) -> Path:
    """The environment's directory, in the user's cache or in $BLACKFORGE_SDKS. Its name depends on the versions."""
    cache = Path(os.environ.get("BLACKFORGE_SDKS") or Path.home() / ".cache" / "blackforge" / "sdks")
    versions = f"{sys.version}\n{(REQUIREMENTS / f'{name}.txt').read_text()}"
    return cache / f"{name}-{hashlib.sha256(versions.encode()).hexdigest()[:16]}"


def made(name: str) -> Path | None:
    """The interpreter of an environment that is complete; None where there is none."""
    directory = directory_of(name)
    return directory / "bin" / "python" if (directory / ".installed").exists() else None


def make(name: str) -> Path:
    """The interpreter of the environment, which is made if this machine has none of these versions."""
    directory = directory_of(name)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be making the same one
        if (python := made(name)) is not None:
            return python
        shutil.rmtree(directory, ignore_errors=True)
        venv.create(directory, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(directory / "bin" / "python"), "install", "-q"]
        # the files name every package, so nothing has to be resolved
        subprocess.run([*pip, "--no-deps", "--no-compile", "-r", str(REQUIREMENTS / f"{name}.txt")], check=True)
        (directory / ".installed").touch()
    return directory / "bin" / "python"


def packages_beside_ours(name: str) -> Path:
    """The packages of an environment that holds only what ours lacks: put them on PYTHONPATH of our interpreter."""
    [packages] = make(name).parents[1].glob("lib/python*/site-packages")
    return packages


def npm_packages(source: Path) -> Path:
    """A directory with the packages that `source` locks in its package-lock.json, and with its scripts."""
    lock = (source / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blackforge"
    directory = cache / f"{source.name.replace('_', '-')}-{hashlib.sha256(lock).hexdigest()[:16]}"
    directory.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # several workers of tests may start at once
        if not (directory / "installed").is_file():
            for name in ("package.json", "package-lock.json"):
                shutil.copy(source / name, directory)
            words = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            subprocess.run(words, cwd=directory, check=True, capture_output=True, timeout=600)
            (directory / "installed").touch()
        for script in source.glob("*.mjs"):
            shutil.copy(script, directory)
    return directory


if __name__ == "__main__":
    for each in sys.argv[1:] or NAMES:
        print(f"{each}: {make(each)}")
