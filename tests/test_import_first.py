"""Any module can be imported first: the order of imports never matters to whoever uses or debugs a single one."""

import importlib.util
import subprocess
import sys

import pytest

from tests.conftest import need
from tests.test_house import PACKAGES, ROOT, imported, module_names, sources

ELSEWHERE = ("proxy.engine.cpu.path", "proxy.pool.migrations")
"""Modules that only other programs load: the engine's process through its PYTHONPATH, and Alembic."""
MEGATRON_ROOM = "trainer.megatron"


@pytest.mark.long  # tests/test_house.py holds the imports free of cycles
@pytest.mark.parametrize("package", PACKAGES)
def test_any_module_can_be_imported_first(package: str) -> None:
    preloaded = []
    if package == "trainer":
        need("megatron-core", importlib.util.find_spec("megatron") is not None)
        preloaded = [MEGATRON_ROOM]  # loads megatron.core once, as it takes seconds
    modules = [name for name in module_names(package) if not name.startswith(ELSEWHERE)]
    command = [sys.executable, "-m", "tests.import_first", *preloaded]
    output = subprocess.run(
        command, input="\n".join(modules), cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert output.stdout == ""


def test_only_the_megatron_room_imports_megatron() -> None:
    """Importing the room first installs Megatron's port to the CPU, which every import of megatron.core needs."""
    room = ROOT / MEGATRON_ROOM.replace(".", "/")
    others = (path for package in PACKAGES for path in sources(package) if not path.is_relative_to(room))
    assert [str(path) for path in others if any(name.split(".")[0] == "megatron" for name in imported(path))] == []
