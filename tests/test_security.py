"""docs/security.md: every row of its tables names a test that exists."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\|.*\| (tests/\S+\.py)::(\w+) \|$", re.M)


def test_every_named_test_exists() -> None:
    page = (ROOT / "docs/security.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and not re.match(r"\| (---|who may)", line)]
    named = ROW.findall(page)
    assert len(named) == len(rows), [line for line in rows if not ROW.match(line)]
    assert [f"{file}::{name}" for file, name in named if name not in names_in(ROOT / file)] == []


def names_in(file: Path) -> set[str]:
    if not file.exists():
        return set()
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
