"""Arrow record batches of recorded completions, one row each. Needs blackforge[parquet].

Messages and reward parts are JSON text, because their keys differ from row to row.
"""

from array import array
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.read.pages import ALL, RolloutFilter, rollouts
from proxy.pool.read.records import RolloutRecord

COLUMNS = {
    "run": "string",
    "task": "string",
    "domain": "string",
    "group": "int64",
    "group_state": "string",
    "step": "int64",
    "rollout": "int64",
    "member": "int64",
    "attempt": "int64",
    "agent": "string",
    "final": "bool",
    "completion": "int64",
    "ordinal": "int64",
    "follows": "int64",
    "prefix_of": "int64",
    "prefix_length": "int64",
    "message": "json",
    "label": "string",
    "finish_reason": "string",
    "untrainable": "string",
    "untrainable_detail": "string",
    "untrained": "string",
    "misfit": "string",
    "tokens": "list int32",
    "prompt_length": "int64",
    "mask": "list int8",
    "given": "places",
    "logprobs": "list float",
    "versions": "spans",
    "reward": "double",
    "reward_parts": "json",
    "failure": "string",
    "weight": "double",
    "hacked": "string",
}
"""Column -> its type, by pyarrow's name where there is one."""
ROWS, TOKENS = 256, 1_000_000
"""Most rows of a batch, and the tokens after which a batch ends."""


def record_batches(source: Pool | str | Path, which: RolloutFilter = ALL) -> Iterator[Any]:
    """Yield the completions of these rollouts as `pyarrow.RecordBatch`es, at most 256 rows each.

    `tokens` is a list of T int32, `mask` of T int8 (1: sampled, and may be trained), `logprobs` of S float32;
    `given` and `versions` are lists of spans (see CompletionRecord), `message` and `reward_parts` JSON text.
    """
    for rows in batches(rollouts(source, which)):
        yield to_batch(rows)


def batches(found: Iterable[RolloutRecord]) -> Iterator[list[dict[str, Any]]]:
    """Yield flat rows of the completions of rollouts, a bounded number at a time."""
    rows: list[dict[str, Any]] = []
    tokens = 0
    for rollout in found:
        for row in rollout.rows():
            rows.append(row)
            tokens += len(row["tokens"])
            if len(rows) == ROWS or tokens >= TOKENS:
                yield rows
                rows, tokens = [], 0
    if rows:
        yield rows


@cache
def arrow_schema() -> Any:
    """Return the schema of the batches; UserError when pyarrow is not installed."""
    try:
        import pyarrow  # large, and needed for this only
    except ModuleNotFoundError as error:
        raise UserError(f"Arrow and Parquet need {error.name}; install blackforge[parquet]") from error
    text, number = pyarrow.string(), pyarrow.int64()
    versions = pyarrow.struct({"version": text, "start": number, "end": number})
    own = {"json": text, "spans": pyarrow.list_(versions), "places": pyarrow.list_(pyarrow.list_(number))}

    def arrow(kind: str) -> Any:
        if kind.startswith("list "):
            return pyarrow.list_(pyarrow.type_for_alias(kind.removeprefix("list ")))
        return own.get(kind) or pyarrow.type_for_alias(kind)

    return pyarrow.schema([(name, arrow(kind)) for name, kind in COLUMNS.items()])


def to_batch(rows: list[dict[str, Any]]) -> Any:
    """Return flat rows as a `pyarrow.RecordBatch`."""
    import pyarrow

    schema, columns = arrow_schema(), []
    for name, kind in COLUMNS.items():
        values = [row[name] for row in rows]
        if kind.startswith("list "):
            columns.append(_lists(values, schema.field(name).type))
        elif kind == "json":
            texts = [None if value is None else msgspec.json.encode(value).decode() for value in values]
            columns.append(pyarrow.array(texts, schema.field(name).type))
        else:
            columns.append(pyarrow.array(msgspec.to_builtins(values), schema.field(name).type))
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def _lists(values: "list[array[Any]]", kind: Any) -> Any:
    """Return a column of number lists, without a Python object for each number."""
    import pyarrow

    numbers = b"".join(value.tobytes() for value in values)
    ends = pyarrow.array([0, *accumulate(map(len, values))], pyarrow.int32())
    flat = pyarrow.Array.from_buffers(kind.value_type, sum(map(len, values)), [None, pyarrow.py_buffer(numbers)])
    return pyarrow.ListArray.from_arrays(ends, flat, type=kind)
