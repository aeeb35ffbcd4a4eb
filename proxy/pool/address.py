"""Where a pool is: database URLs, which of them are served, and how they are shown without their passwords."""

import re

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from proxy.pool.errors import UserError

DRIVERS = {
    "sqlite": "sqlite",
    "sqlite+pysqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}
"""URL scheme -> the dialect and driver that serve it."""


def shown(url: str) -> str:
    """A URL as messages may show it. Of malformed ones too, all from a first colon to the last @ is hidden."""
    url = re.sub(r"(:/*[^:/@]*):.*@", r"\1:***@", url)
    return re.sub(r"(?i)(password=)[^&]*", r"\1***", url)


def parsed(url: str) -> URL:
    """The parts of a database URL; UserError when it is none, or none of SQLite or PostgreSQL."""
    try:
        address = make_url(url)
    except (ArgumentError, ValueError):  # their texts may quote what stands where the password belongs
        raise UserError(
            f"{shown(url)} is no database URL; write sqlite:///FILE or postgresql://USER:PASSWORD@HOST:PORT/NAME, "
            "special characters percent-encoded"
        ) from None
    if "@" in (address.host or ""):
        raise UserError(f"the database URL {shown(url)} has more than one @; write those of the password as %40")
    if address.drivername not in DRIVERS:
        raise UserError(f"{shown(url)} is no database that holds pools; use sqlite:///FILE or postgresql://...")
    return address.set(drivername=DRIVERS[address.drivername])
