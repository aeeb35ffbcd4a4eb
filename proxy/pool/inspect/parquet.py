"""Parquet files of records. Messages and reward parts are JSON text, because their keys differ from row to row."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from proxy.pool.errors import UserError

Write = Callable[[list[dict[str, Any]]], None]
"""Writes a batch of records."""

COLUMNS = {
    "run": "string",
    "task": "string",
    "domain": "string",
    "group": "int64",
    "group_state": "string",
    "step": "int64",
    "member": "int64",
    "attempt": "int64",
    "agent": "string",
    "final": "bool",
    "completion": "int64",
    "ordinal": "int64",
    "follows": "int64",
    "message": "json",
    "label": "string",
    "finish_reason": "string",
    "untrainable": "string",
    "untrainable_detail": "string",
    "misfit": "string",
    "tokens": "list int32",
    "prompt_length": "int64",
    "mask": "list int8",
    "given": "places",
    "logprobs": "list float32",
    "versions": "spans",
    "reward": "float64",
    "reward_parts": "json",
    "failure": "string",
}
"""Column -> its type, by pyarrow's name where there is one."""


@contextmanager
def parquet_writer(file: Path) -> Iterator[Write]:
    """Open a Parquet file and yield its writer; UserError when pyarrow is not installed."""
    try:
        import pyarrow  # large, and needed for this one format only
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise UserError(f"Parquet needs {error.name}; install blackforge[parquet] or use --format jsonl") from error

    text, number = pyarrow.string(), pyarrow.int64()
    versions = pyarrow.struct({"version": text, "start": number, "end": number})
    own = {"json": text, "spans": pyarrow.list_(versions), "places": pyarrow.list_(pyarrow.list_(number))}

    def arrow(kind: str) -> Any:
        if kind.startswith("list "):
            return pyarrow.list_(pyarrow.type_for_alias(kind.removeprefix("list ")))
        return own.get(kind) or pyarrow.type_for_alias(kind)

    schema = pyarrow.schema([(name, arrow(kind)) for name, kind in COLUMNS.items()])
    with parquet.ParquetWriter(file, schema) as output:
        yield lambda rows: output.write_table(pyarrow.Table.from_pylist([_flat(row) for row in rows], schema))


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    texts = [name for name, kind in COLUMNS.items() if kind == "json" and row[name] is not None]
    return row | {name: msgspec.json.encode(row[name]).decode() for name in texts}
