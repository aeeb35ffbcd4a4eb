"""SQLite pools that cannot grow any more: what a full disk does to them, in all connections of this process."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Engine, event

MANY_PAGES = 1_000_000


def _limit(pages: int) -> Callable[[Any], None]:
    def set_limit(connection: Any) -> None:
        if connection.dialect.name == "sqlite":
            connection.exec_driver_sql(f"pragma max_page_count = {pages}")

    return set_limit


@contextmanager
def full_disk() -> Iterator[None]:
    """Let no pool grow while the block lasts. Pages that it has stay; it goes on afterwards."""
    full = _limit(1)
    event.listen(Engine, "begin", full)
    try:
        yield
    finally:
        event.remove(Engine, "begin", full)
        event.listen(Engine, "begin", _limit(MANY_PAGES))  # connections keep their limit until they get another one
