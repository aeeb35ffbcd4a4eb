"""docs/security.md: every row that says what stops somebody names a test that exists."""

import ast
import re
from pathlib import Path

from harness.verdict.shared import SENTENCES

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/security.md").read_text()
ROW = re.compile(r"^\|.*\| (tests/\S+\.py)::(\w+) \|$")


def test_every_named_test_exists() -> None:
    tables = re.findall(r"^\| who may .*\n\| ---.*\n((?:\|.*\n)+)", PAGE, re.M)
    rows = [row for table in tables for row in table.splitlines()]
    named = [match.groups() for row in rows if (match := ROW.match(row))]
    assert len(tables) == 5 and len(named) == len(rows), [row for row in rows if not ROW.match(row)]
    assert [f"{file}::{name}" for file, name in named if name not in names_in(ROOT / file)] == []


def test_the_page_lists_what_is_not_stopped() -> None:
    assert [kind for kind, sentence in SENTENCES.items() if f"| {kind} | {sentence} |" not in PAGE] == []


def names_in(file: Path) -> set[str]:
    if not file.exists():
        return set()
    return {
        node.name
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
