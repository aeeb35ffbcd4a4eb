"""Archive files: the rows of completions that may leave the pool, with their place in the run. Parquet with zstd.

A row has the columns of the table `completions` as they are stored, JSON as text. Token arrays are bytes, as in the
pool (proxy/pool/schema.py). An attempt lies in one row group, in the order of its commits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
from sqlalchemy import JSON, Column, Float, Integer, LargeBinary

from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import from_row
from proxy.pool.compressed_json import CompressedJson
from proxy.pool.errors import UserError
from proxy.pool.schema import completions

PLACE = {
    "run": "string",
    "task": "string",
    "domain": "string",
    "queue_index": "int64",
    "step": "int64",
    "rollout_id": "int64",
    "member": "int64",
    "final": "bool",
    "reward": "double",
    "reward_parts": "json",
    "failure": "string",
    "weight": "double",
    "set_aside": "string",
    "hacked": "string",
}
"""Column -> its type by pyarrow's name. They are for other readers; ours takes them from the pool."""
FATE = {"fate_version": "int64", "trained": "int64", "left_out": "json"}
"""What the last step that took a completion did with its tokens (proxy/pool/training/fates.py); null: none took it."""
GROUP_BYTES = 16 << 20
"""Bytes of arrays after which a row group ends."""


def _kind(column: Column[Any]) -> str:
    kinds = {Integer: "int64", Float: "double", LargeBinary: "binary", JSON: "json", CompressedJson: "json"}
    return next((kind for sort, kind in kinds.items() if isinstance(column.type, sort)), "string")


COLUMNS = PLACE | {column.name: _kind(column) for column in completions.c} | FATE
JSON_COLUMNS = [name for name, kind in COLUMNS.items() if kind == "json"]


class ArchiveWriter:
    """Writes attempts to an archive file that is open."""

    def __init__(self, parquet: Any, schema: Any):
        self._parquet = parquet
        self._schema = schema
        self._rows: list[dict[str, Any]] = []
        self._bytes = 0
        self.completions = 0

    def add(self, rows: list[dict[str, Any]]) -> None:
        """Add the rows of one attempt."""
        for row in rows:
            texts = {name: None if row[name] is None else msgspec.json.encode(row[name]) for name in JSON_COLUMNS}
            self._rows.append(row | texts)
            self._bytes += sum(len(value) for value in self._rows[-1].values() if isinstance(value, bytes))
        self.completions += len(rows)
        if self._bytes >= GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """End the row group."""
        if self._rows:
            self._parquet.write_table(_pyarrow().Table.from_pylist(self._rows, self._schema))
        self._rows, self._bytes = [], 0


@contextmanager
def archive_writer(file: Path) -> Iterator[ArchiveWriter]:
    """Open a new archive file."""
    pyarrow = _pyarrow()
    kinds = {
        name: pyarrow.string() if kind == "json" else pyarrow.type_for_alias(kind) for name, kind in COLUMNS.items()
    }
    schema = pyarrow.schema(list(kinds.items()))
    with pyarrow.parquet.ParquetWriter(file, schema, compression="zstd") as parquet:
        writer = ArchiveWriter(parquet, schema)
        yield writer
        writer.flush()


class ArchiveFile:
    """An archive file that is read attempt by attempt. It holds one row group in memory, and the list of attempts."""

    def __init__(self, file: Path, experts: bool = False):
        """UserError when the file is missing or damaged. `experts`: also read routed experts, which are large."""
        self._file = file
        self._columns = [name for name in COLUMNS if experts or name != "experts"]
        with self._readable():
            self._parquet = _pyarrow().parquet.ParquetFile(file)
            self._group_of = {
                attempt_id: number
                for number in range(self._parquet.num_row_groups)
                for attempt_id in self._parquet.read_row_group(number, ["attempt_id"])["attempt_id"].to_pylist()
            }
        self._loaded = -1
        self._rows: dict[int, list[Completion]] = {}

    def of_attempt(self, attempt_id: int) -> list[Completion]:
        """Return the completions of an attempt in the order of their commits; none if the file has none."""
        number = self._group_of.get(attempt_id)
        if number is None:
            return []
        if number != self._loaded:
            self._rows = {}
            with self._readable():
                for row in self._parquet.read_row_group(number, self._columns).to_pylist():
                    self._rows.setdefault(row["attempt_id"], []).append(_completion(row))
            self._loaded = number
        return self._rows[attempt_id]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:  # pyarrow's own errors of files are among them
            raise UserError(
                f"the archive {self._file} cannot be read ({' '.join(str(error).split())}); put it back, or name the "
                "directory where it is now (RolloutFilter.archives)"
            ) from error


def _completion(row: dict[str, Any]) -> Completion:
    values = {name: None if row.get(name) is None else msgspec.json.decode(row[name]) for name in JSON_COLUMNS}
    later: dict[str, Any] = dict.fromkeys(COLUMNS)  # a file of an older schema lacks some columns
    stored: Any = SimpleNamespace(**(later | row | values))
    return from_row(stored)


def _pyarrow() -> ModuleType:
    try:
        import pyarrow  # large, and needed for archives only
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UserError(f"archives need {error.name}; install blackforge[parquet]") from error
    return pyarrow
