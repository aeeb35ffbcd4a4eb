"""Makes requirements/gpu.txt (`make lock-gpu`), or with --check says whether pip still resolves to exactly that.

pip resolves what pyproject.toml asks for on a GPU machine, in a dry run, for each of PYTHONS. It reads the metadata out
of the wheels (fast-deps) instead of fetching gigabytes. Linux on x86-64 only, wheels only.
"""

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "requirements" / "gpu.txt"
PYTHONS = ("3.11", "3.12")
PIP = "pip==26.3"
"""Older ones fetch whole wheels in a dry run."""
ELSEWHERE = ("docs", "sglang-cpu")
"""Extras that are not installed on a GPU machine."""
DECIDED_BY_SGLANG = ("torch", "numpy")
"""Packages whose version of constraints.txt SGLang's own requirements exclude."""
HEAD = """\
# Made by `make lock-gpu`; do not edit. Everything for a machine with NVIDIA GPUs and a driver for CUDA 13: engine,
# trainer and tests in one environment. Linux on x86-64, Python {pythons}. `make install-gpu` installs it.
"""


class Pin(NamedTuple):
    """One wheel that pip chose."""

    version: str
    sha256: str


Pins = dict[str, Pin]
"""By normalised name."""


def main(arguments: list[str]) -> int:
    """Write the lock; with --check compare it with what pip resolves for this Python."""
    with tempfile.TemporaryDirectory(prefix="lock-") as directory:
        if arguments == ["--check"]:
            return _check(Path(directory))
        by_python: dict[str, Pins] = {}
        constraints = _tested_versions()
        for version in PYTHONS:
            pins = by_python[version] = resolve(f"python{version}", constraints, Path(directory, version))
            constraints = [f"{name}=={pin.version}" for name, pin in pins.items()]
            print(f"Python {version}: {len(pins)} packages")
    LOCK.write_text(HEAD.format(pythons=" and ".join(PYTHONS)) + "".join(_lines(by_python)))
    return 0


def resolve(python: str, constraints: Iterable[str], directory: Path) -> Pins:
    """What pip would install with this interpreter into an empty environment."""
    subprocess.run([python, "-m", "venv", directory], check=True)
    own = directory / "bin" / "python"
    subprocess.run([own, "-m", "pip", "install", "-q", PIP], check=True)
    files = {"requirements": _requirements(), "constraints": constraints}
    for name, lines in files.items():
        (directory / name).write_text("\n".join(lines))
    command: list[str | Path] = [own, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
    command += ["--only-binary", ":all:"]
    command += ["--use-feature=fast-deps", "--report", directory / "report.json"]
    command += ["-r", directory / "requirements", "-c", directory / "constraints"]
    subprocess.run(command, check=True)
    chosen = json.loads((directory / "report.json").read_bytes())["install"]
    return {
        normal(item["metadata"]["name"]): Pin(
            item["metadata"]["version"], item["download_info"]["archive_info"]["hashes"]["sha256"]
        )
        for item in chosen
    }


def read_lock(python: str) -> dict[str, tuple[str, set[str]]]:
    """The versions and hashes of the lock for one Python, by name."""
    locked = {}
    for entry in re.split(r"\n(?=\S)", LOCK.read_text()):
        found = re.match(r'([\w.-]+)==([^\s;]+)(?: ; python_version == "([\d.]+)")?', entry)
        if found and found[3] in (None, python):
            locked[found[1]] = (found[2], set(re.findall(r"sha256:(\w+)", entry)))
    return locked


def normal(requirement: str) -> str:
    """The normalised name of a requirement's package."""
    name = re.match(r"[\w.-]+", requirement)
    assert name
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def _check(directory: Path) -> int:
    locked = read_lock(".".join(map(str, sys.version_info[:2])))
    pins = resolve(sys.executable, [f"{name}=={version}" for name, (version, _) in locked.items()], directory)
    wrong = sorted(locked.keys() ^ pins.keys())
    wrong += [name for name in locked.keys() & pins.keys() if not _same(locked[name], pins[name])]
    print(f"{len(pins)} packages resolved, {len(locked)} locked; they differ in: {', '.join(wrong) or 'none'}")
    return 1 if wrong else 0


def _same(locked: tuple[str, set[str]], pin: Pin) -> bool:
    version, hashes = locked
    return version == pin.version and pin.sha256 in hashes


def _requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [wanted for name, wanted in project["optional-dependencies"].items() if name not in ELSEWHERE]
    return [*project["dependencies"], *(requirement for extra in extras for requirement in extra)]


def _tested_versions() -> list[str]:
    """The versions that CI runs with, of the packages that pyproject.toml names."""
    named = {normal(requirement) for requirement in _requirements()} - set(DECIDED_BY_SGLANG)
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    return [line for line in lines if normal(line) in named]


def _lines(by_python: Mapping[str, Pins]) -> Iterable[str]:
    """One entry for each package and version, with a marker where the Pythons differ."""
    for name in sorted({name for pins in by_python.values() for name in pins}):
        versions: dict[str, dict[str, str]] = {}
        for python, pins in by_python.items():
            if name in pins:
                versions.setdefault(pins[name].version, {})[python] = pins[name].sha256
        for version, hashes in versions.items():
            markers = [""] if len(hashes) == len(by_python) else [f' ; python_version == "{at}"' for at in hashes]
            for marker in markers:
                wanted = hashes.values() if not marker else [hashes[marker.split('"')[1]]]
                own = "".join(f" \\\n    --hash=sha256:{value}" for value in dict.fromkeys(wanted))
                yield f"{name}=={version}{marker}{own}\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
