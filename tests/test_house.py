"""The rules of the house that a machine can hold: light imports, one-way arrows, pages that name real things."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("proxy", "harness", "trainer", "sandboxes")
ALLOWED = {("harness", "sandboxes"), ("harness", "proxy.pool"), ("trainer", "proxy.pool")}
HEAVY = ("torch", "transformers", "litellm", "sglang", "megatron", "numpy")


@pytest.mark.parametrize("package", ["proxy", "harness", "sandboxes"])
def test_importing_every_module_of_a_package_loads_nothing_heavy(package: str) -> None:
    modules = [name for name in module_names(package) if ".engine.cpu" not in name and "migrations" not in name]
    code = f"import sys, {', '.join(modules)}; print([m for m in {HEAVY!r} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_imports_run_one_way() -> None:
    against = []
    for package in PACKAGES:
        for path in sources(package):
            for target in imported(path):
                if (
                    target.split(".")[0] in PACKAGES
                    and target.split(".")[0] != package
                    and not allowed(package, target)
                ):
                    against.append(f"{path.relative_to(ROOT)} imports {target}")
    assert against == []


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))])
def test_every_path_on_a_page_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"\b(?:(?:docs|examples|tests|benchmarks|proxy|harness|trainer|sandboxes)/[\w./-]*\w)", text)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_names(package: str) -> list[str]:
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources(package))
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""


def allowed(package: str, target: str) -> bool:
    return any(package == source and target.startswith(into) for source, into in ALLOWED)
