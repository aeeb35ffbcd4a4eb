"""Export of a run, one record per completion: JSONL for reading, Parquet for tables.

All attempts are written. Only the attempt that gave a rollout its outcome is `final` and has the reward.
"""

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.files import replacing
from proxy.pool.read.arrow import arrow_schema, batches, to_batch
from proxy.pool.read.pages import RolloutFilter
from proxy.pool.read.shown import shown

Write = Callable[[list[dict[str, Any]]], None]
"""Writes a batch of records."""


def export(pool: Pool, which: RolloutFilter, kind: str, file: Path) -> int:
    """Write the completions that pass to a file; return their number. Only a complete file replaces an existing one."""
    count = 0
    try:
        with (
            shown(pool, which, f"writing {file.name}") as found,
            replacing(file) as partial,
            WRITERS[kind](partial) as write,
        ):
            for rows in batches(found):
                write(rows)
                count += len(rows)
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); name a file in a writable directory") from error
    return count


@contextmanager
def _jsonl(file: Path) -> Iterator[Write]:
    with file.open("wb") as output:
        yield lambda rows: output.writelines(msgspec.json.encode(row, enc_hook=_numbers) + b"\n" for row in rows)


def _numbers(value: Any) -> list[float]:
    assert isinstance(value, array)
    return value.tolist()


@contextmanager
def _parquet(file: Path) -> Iterator[Write]:
    schema = arrow_schema()
    from pyarrow import parquet  # large, and needed for this one format only

    with parquet.ParquetWriter(file, schema, compression="zstd") as output:
        yield lambda rows: output.write_batch(to_batch(rows))


WRITERS = {"jsonl": _jsonl, "parquet": _parquet}
"""The formats."""
