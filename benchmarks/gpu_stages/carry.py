"""Fetch the wheels that the stages need beside torch and transformers, for a machine without a network."""

import re
import subprocess
import sys
from pathlib import Path

PYTHON = "3.12"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
CARRIED = ("alembic", "mako", "megatron-core", "msgspec", "prometheus-client", "psutil", "sqlalchemy")
"""What the stages import and neither torch nor transformers brings along; a test holds this list to what they load."""
LIMIT_BYTES = 60 * 10**6
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def pinned(name: str) -> str:
    """Return a package with its version in constraints.txt. SystemExit when it has none."""
    for line in CONSTRAINTS.read_text().splitlines():
        if re.fullmatch(rf"{re.escape(name)}==\S+", line.strip().lower().replace("_", "-")):
            return line.strip()
    raise SystemExit(f"error: constraints.txt has no version of {name}; add it")


def carry(directory: Path) -> int:
    """Fetch the wheels into a directory; says how to install them there. Exit status 1 when pip fails."""
    directory.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp", "-q"]
    options += [part for platform in PLATFORMS for part in ("--platform", platform)]
    names = [pinned(name) for name in CARRIED]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(directory), *names]
    if subprocess.run(command).returncode:
        print("error: pip could not fetch the wheels; its message is above", file=sys.stderr)
        return 1
    size = sum(wheel.stat().st_size for wheel in directory.glob("*.whl"))
    if size > LIMIT_BYTES:
        print(f"error: the wheels have {size / 1e6:.1f} MB, {LIMIT_BYTES / 1e6:.0f} MB may be carried", file=sys.stderr)
        return 1
    print(f"{len(names)} wheels, {size / 2**20:.1f} MiB; there: pip install --no-index --no-deps --target SITE *.whl")
    return 0
