"""Rules that a machine can check: light imports, one-way arrows, small rooms, pages that name real paths."""

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

import pytest

from proxy.pool.database import HEAD

ROOT = Path(__file__).parent.parent
PACKAGES = ("proxy", "harness", "trainer", "sandboxes")
ALLOWED = {("harness", "sandboxes"), ("harness", "proxy.pool"), ("trainer", "proxy.pool")}
LOOSE_MODULES = 8
"""A package folder has at most this many modules of its own; the others lie in rooms."""
ROOM_MODULES = 13
AGENTS = ROOT / "harness" / "agents"
COPIED_OUT = (AGENTS / "native", AGENTS / "sdk" / "programs")
"""Import nothing else of the project, and their own files by relative imports only."""
PAGES = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md"),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))),
]
HEAVY = ("torch", "transformers", "litellm", "sglang", "megatron", "numpy", "sqlalchemy.dialects.postgresql")


@pytest.mark.parametrize("package", ["proxy", "harness", "sandboxes"])
def test_importing_every_module_of_a_package_loads_nothing_heavy(package: str) -> None:
    modules = [name for name in module_names(package) if ".engine.cpu" not in name and "migrations" not in name]
    code = f"import sys, {', '.join(modules)}; print([m for m in {HEAVY!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


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


def test_what_agents_run_may_be_copied_out() -> None:
    needed = []
    for folder in COPIED_OUT:
        inside = ".".join(folder.relative_to(ROOT).parts)
        targets = {target for path in folder.glob("*.py") for target in imported(path)}
        outside = {target.split(".")[0] for target in targets if not target.startswith(inside)}
        needed.append(outside - sys.stdlib_module_names)
    native, programs = needed
    assert native == set() and programs.isdisjoint(PACKAGES) and programs


def test_no_room_is_a_heap() -> None:
    sizes = Counter(path.parent for package in PACKAGES for path in sources(package) if not special(path))
    assert {package: sizes[ROOT / package] for package in PACKAGES if sizes[ROOT / package] > LOOSE_MODULES} == {}
    assert {str(room): size for room, size in sizes.items() if size > ROOM_MODULES} == {}


def test_siblings_import_one_another_in_one_direction() -> None:
    """At every level: of two modules or rooms in one folder, at most one depends on the other, also through others."""
    folders: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for package in PACKAGES:
        names = set(module_names(package))
        for path in sources(package):
            importer = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__").split(".")
            for target in imported_modules(path, names):
                level = next((i for i, (a, b) in enumerate(zip(importer, target, strict=False)) if a != b), 0)
                if level:
                    folders[".".join(target[:level])][importer[level]].add(target[level])
    loops = []
    for folder, graph in folders.items():
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            loops.append(f"{folder}: {' -> '.join(error.args[1])}")
    assert loops == []


LIVES_ELSEWHERE = re.compile(
    r"\b(no|none|not|nothing|never|elsewhere|above|below|beside)\b|\b(in|by)\s+[a-z]+/[a-z]", re.IGNORECASE
)
"""How a room's sentence names what does not live there: a word that says no, or the place where it lives."""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_says_what_lives_in_it_and_what_does_not(package: str) -> None:
    rooms = {path.parent for path in sources(package) if not {"versions", "path"} & set(path.parts)}
    assert rooms
    texts = {room: (room / "__init__.py").read_text() if (room / "__init__.py").exists() else "" for room in rooms}
    silent = (room for room in rooms if not LIVES_ELSEWHERE.search(ast.get_docstring(ast.parse(texts[room])) or ""))
    assert sorted(str(room.relative_to(ROOT)) for room in silent) == []


def test_the_readme_names_every_room_of_the_second_level() -> None:
    text = (ROOT / "README.md").read_text()
    [tree] = re.findall(r"^## Where things are\n+```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    named, package = set(), ""
    for line in tree.splitlines():
        package = line.split("/")[0] if not line.startswith(" ") else package
        named |= {(package, room) for room in re.findall(r"(?<=[ ])(\w+)/", line)}
    rooms = {(package, room.parent.name) for package in PACKAGES for room in (ROOT / package).glob("*/__init__.py")}
    assert rooms - named == set()


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_page_has_more_than_120_characters(page: str) -> None:
    """But rows of tables, and tasks as lines of JSON, which a file must have on one line."""
    lines = enumerate((ROOT / page).read_text().splitlines(), start=1)
    assert [n for n, line in lines if len(line) > 120 and not re.match(r"\||\{.*\}$", line)] == []


@pytest.mark.parametrize("page", PAGES)
def test_every_path_on_a_page_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"\b(?:(?:docs|examples|tests|benchmarks|proxy|harness|trainer|sandboxes)/[\w./-]*\w)", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_migrations_are_numbered_in_one_line() -> None:
    """Two that were written at the same time must not share a number: the second one would never run."""
    files = sorted((ROOT / "proxy" / "pool" / "migrations" / "versions").glob("[0-9]*.py"))
    numbers = [tuple(re.findall(r'^(?:down_)?revision = "?(\w+)', file.read_text(), re.MULTILINE)) for file in files]
    names = ["None", *(file.name[:4] for file in files)]
    assert numbers == [(after, before) for before, after in pairwise(names)]
    assert f'\nHEAD = "{names[-1]}"\n' in (ROOT / "proxy" / "pool" / "database.py").read_text()


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def special(path: Path) -> bool:
    """Whether a file is no module of its folder's own: a package's entry points, or files that others write or load."""
    return path.name in ("__init__.py", "__main__.py") or "versions" in path.parts or "sgl_kernel" in path.parts


def imported_modules(path: Path, names: set[str]) -> Iterator[list[str]]:
    """The parts of the name of each module of `names` that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        targets = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = [f"{imported_from(node, path)}.{alias.name}" for alias in node.names]
        for target in targets:
            while target and target not in names:
                target = target.rpartition(".")[0]
            if target:
                yield target.split(".")


def module_names(package: str) -> list[str]:
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources(package))
    return [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield imported_from(node, path)


def imported_from(node: ast.ImportFrom, path: Path) -> str:
    """The module that an import names. Relative to its folder it may be where that is copied out of the project."""
    assert node.level == 0 or (node.level == 1 and path.parent in COPIED_OUT), f"{path}: relative import"
    folder = ".".join(path.parent.relative_to(ROOT).parts) + "." if node.level else ""
    return f"{folder}{node.module or ''}"


def allowed(package: str, target: str) -> bool:
    return any(package == source and target.startswith(into) for source, into in ALLOWED)


def test_migrations_follow_one_another_and_the_code_reads_the_last() -> None:
    numbers = [path.name[:4] for path in sorted((ROOT / "proxy/pool/migrations/versions").glob("*.py"))]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)] and HEAD == numbers[-1]
