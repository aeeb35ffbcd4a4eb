"""One bounded look at a pool: a snapshot whose statements end after some seconds, whatever they were going to read.

The queries of this room are made to read few rows, and tests hold them to it. The limit is for what no test foresaw.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, text

from proxy.pool.database import Pool

QUERY_SECONDS = 10
"""Maximum seconds of a look; with PostgreSQL of one statement."""
CHECKED_EVERY = 50_000
"""Instructions of SQLite's virtual machine between two looks at the clock: some milliseconds."""


@contextmanager
def snapshot(pool: Pool, seconds: float = QUERY_SECONDS) -> Iterator[Connection]:
    """Open a snapshot for bounded queries. PoolReadError when they take longer than `seconds`."""
    with pool.read() as connection:
        if pool.dialect != "sqlite":
            connection.execute(text(f"set local statement_timeout = {round(seconds * 1000)}"))
            yield connection
            return
        driver = connection.connection.driver_connection
        assert isinstance(driver, sqlite3.Connection)
        until = time.monotonic() + seconds
        driver.set_progress_handler(lambda: time.monotonic() > until, CHECKED_EVERY)
        try:
            yield connection
        finally:
            driver.set_progress_handler(None, 0)
