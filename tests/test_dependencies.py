"""pyproject.toml declares every library that the packages import, and docs/dependencies.md says what it is for."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("proxy", "harness", "trainer", "sandboxes")
ALWAYS = {"proxy": (), "harness": (), "sandboxes": (), "trainer": ("trainer",)}
"""The extras with which each package is imported; other extras are for what a function imports when it is called."""
ELSEWHERE = {
    "harness/agents/sdk/programs": "agents' programs, which run in agents' environments",
    "proxy/engine/cpu/path": "loaded by SGLang, in place of its kernels",
    "proxy/engine/cpu/plugin.py": "loaded by SGLang",
}
"""Places whose imports are not ours to declare, with the reason."""
DISTRIBUTIONS = {
    "datasets": "datasets",
    "opentelemetry": "opentelemetry-sdk",
    "magi_attention": None,  # built by hand where a GPU has it (docs/cluster.md); no package index has it
}
"""Libraries that this environment lacks, or that several distributions share -> the one that must be declared."""


def normal(requirement: str) -> str:
    """The name of a requirement, in the form that names are compared in."""
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def declared(*extras: str) -> set[str]:
    wanted = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][name] for name in extras)]
    return {normal(text) for texts in wanted for text in texts}


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run when a module is imported."""
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        typing_only = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not typing_only and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            left += ast.iter_child_nodes(node)


def libraries(nodes: Iterable[ast.AST]) -> set[str]:
    """The first names of the modules of others that are imported."""
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names += [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
    return {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_every_library_that_is_imported_is_declared(package: str) -> None:
    always, ever = declared(*ALWAYS[package]), declared(*PROJECT["optional-dependencies"])
    known = packages_distributions()
    undeclared = []
    for file in sorted((ROOT / package).rglob("*.py")):
        place = str(file.relative_to(ROOT))
        if place.startswith(tuple(ELSEWHERE)):
            continue
        tree = ast.parse(file.read_text())
        for nodes, allowed in ((at_import(tree), always), (ast.walk(tree), ever)):
            for name in libraries(nodes):
                found = [DISTRIBUTIONS[name]] if name in DISTRIBUTIONS else known.get(name, [name])
                if not any(one is None or normal(one) in allowed for one in found):
                    undeclared.append(f"{place} imports {name}")
    assert undeclared == []


def test_the_page_says_what_each_is_for() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    rows = {normal(name) for name in re.findall(r"^\| ([\w.-]+) \|", page, re.MULTILINE)}
    assert declared() - rows == set()
    assert {normal(name) for name in PROJECT["optional-dependencies"]} - rows == set()
