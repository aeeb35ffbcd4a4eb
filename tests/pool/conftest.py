"""Every test of the pool runs on SQLite and on PostgreSQL."""

from collections.abc import Iterator

import pytest

from proxy.pool.database import Pool, open_pool


@pytest.fixture
def pool(database: str) -> Iterator[Pool]:
    """A fresh pool."""
    opened = open_pool(database)
    yield opened
    opened.close()
