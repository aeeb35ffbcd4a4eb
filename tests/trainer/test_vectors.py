"""No worked number of vectors.json is left unused: each of its keys is named in a test that reads the file.

Left out: whether what is read is compared with anything, which is those tests' matter.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors.json").read_text())


def readers() -> Iterator[list[str]]:
    """Of every test module that reads the vectors, the patterns of the strings in it."""
    for path in TESTS.rglob("*.py"):
        if path != Path(__file__) and "vectors.json" in (text := path.read_text()):
            yield [pattern for node in ast.walk(ast.parse(text)) for pattern in patterns(node)]


def patterns(node: ast.AST) -> Iterator[str]:
    """A constant as it is; of an f-string, any text in the place of a value."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield re.escape(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+" for part in node.values]
        if len(parts) > parts.count(".+"):
            yield "".join(parts)


def keys(name: str, value: Any) -> list[str]:
    """A vector's own name and those of its fields; a tree's edges are data, no fields."""
    fields = value[0] if isinstance(value, list) and isinstance(value[0], dict) else value
    return [name, *fields] if isinstance(fields, dict) else [name]


def test_every_worked_number_is_used() -> None:
    named = list(readers())
    assert len(named) > 3
    unused = {
        key
        for name, value in VECTORS.items()
        for key in keys(name, value)
        if not any(used(key, known) and used(name, known) for known in named)
    }
    assert unused == set()


def used(key: str, known: list[str]) -> bool:
    return any(re.fullmatch(pattern, key) for pattern in known)
