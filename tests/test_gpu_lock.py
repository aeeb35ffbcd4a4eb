"""requirements/gpu.txt: what it must hold, and that pip still resolves to it. Nothing of it is installed here."""

import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement

from requirements.lock import ELSEWHERE, LOCK, PYTHONS, ROOT, normal, read_lock

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_holds_what_a_gpu_machine_is_asked_to_install(python: str) -> None:
    locked = read_lock(python)
    extras = [wanted for name, wanted in PROJECT["optional-dependencies"].items() if name not in ELSEWHERE]
    asked = [Requirement(text) for wanted in (PROJECT["dependencies"], *extras) for text in wanted]
    assert len(asked) > 30
    assert [one for one in asked if not one.specifier.contains(locked[normal(one.name)][0])] == []
    assert [name for name, (_, hashes) in locked.items() if not hashes] == []


def test_the_page_names_the_packages_of_the_lock() -> None:
    text = (ROOT / "docs" / "cluster.md").read_text()
    named = re.findall(r"installs the (\d+) packages of `requirements/gpu.txt`|the lock's (\d+) packages", text)
    assert [int(first or second) for first, second in named] == [len(read_lock(PYTHONS[0]))] * 2


def test_the_image_and_the_page_install_the_same_system_packages() -> None:
    page = re.search(r"^apt-get install (.*)$", (ROOT / "docs" / "cluster.md").read_text(), re.MULTILINE)
    image = re.search(r"--no-install-recommends (.*) \\\n", (ROOT / "docker" / "gpu.Dockerfile").read_text())
    assert page and image and {*page[1].split(), "ca-certificates"} == set(image[1].split())


def test_the_lock_has_one_generation_of_cuda() -> None:
    names = {line.split("==")[0] for line in LOCK.read_text().splitlines() if "==" in line}
    assert {"torch", "sglang-kernel", "nvidia-cuda-nvcc", "nvidia-nccl-cu13"} <= names
    other = {name for name in names if name.startswith("nvidia-") and name.endswith("cu12")}
    assert other == {"nvidia-cutlass-dsl-libs-cu12"}  # nvidia-cutlass-dsl brings both
    assert "magi-attention" not in names  # an empty package on PyPI


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_pip_resolves_to_exactly_the_lock() -> None:
    """On this Python. Needs the package index, and reads no more than the wheels' metadata."""
    check = [sys.executable, "requirements/lock.py", "--check"]
    done = subprocess.run(check, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "they differ in: none" in done.stdout
