"""Any module can be imported first: the order of imports never matters to whoever uses or debugs a single one."""

import importlib.util
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.conftest import need
from tests.test_house import PACKAGES, ROOT, imported, imported_modules, module_names, sources

ELSEWHERE = ("proxy.engine.cpu.path", "proxy.pool.migrations")
"""Modules that only other programs load: the engine's process through its PYTHONPATH, and Alembic."""
MEGATRON_ROOM = "trainer.megatron"
SHORT = "sandboxes"
"""The package whose modules are imported one after the other in `make test`: seconds; the others take minutes."""
LONG = [package for package in PACKAGES if package != SHORT]


def prefixes(parts: list[str]) -> set[str]:
    """The names of a module and of the packages around it, which are imported before it."""
    return {".".join(parts[:end]) for end in range(1, len(parts) + 1)}


def test_no_module_imports_one_that_imports_it() -> None:
    """So each can be imported first, also one that a package's `__init__.py` imports. The long test tries it."""
    names = set().union(*map(module_names, PACKAGES))
    graph: dict[str, set[str]] = {}
    for path in (path for package in PACKAGES for path in sources(package) if path.name != "__main__.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        targets = list(imported_modules(path, names))
        around = set().union(*map(prefixes, targets)) - prefixes(name.split("."))
        graph[name] = around | {".".join(target) for target in targets} - {name}
    assert len(graph) > 500
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", [SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)])
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
