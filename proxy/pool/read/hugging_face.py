"""A Hugging Face dataset of recorded completions, one row each. Needs blackforge[datasets]."""

from pathlib import Path
from typing import Any

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.files import replacing
from proxy.pool.read.arrow import arrow_schema, record_batches
from proxy.pool.read.pages import ALL, RolloutFilter


def dataset(source: Pool | str | Path, file: str | Path, which: RolloutFilter = ALL) -> Any:
    """Write the completions to an Arrow file and return it as a `datasets.Dataset`, which maps the file into memory.

    The columns are those of `record_batches`. The file is written a batch at a time and must stay where it is as long
    as the dataset is used.
    """
    try:
        import datasets  # large, and needed here only
        import pyarrow
    except ModuleNotFoundError as error:
        raise UserError(f"a dataset needs {error.name}; install blackforge[datasets]") from error

    # A file of our own, not the library's cache: that one knows a generator by its arguments, so it would return the
    # rows that the pool had when the same question was asked before.
    with replacing(Path(file)) as partial, pyarrow.OSFile(str(partial), "wb") as output:
        with pyarrow.ipc.new_stream(output, arrow_schema()) as stream:
            for batch in record_batches(source, which):
                stream.write_batch(batch)
    return datasets.Dataset.from_file(str(file))
