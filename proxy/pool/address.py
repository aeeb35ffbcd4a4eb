"""Addresses of pools: the database URLs that are supported, and how to show them without passwords."""

import re
from pathlib import Path

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
"""URL scheme -> dialect and driver."""


def shown(url: str) -> str:
    """Return a URL without its password, for messages. In malformed ones too, all from a first colon to the last @ is
    hidden."""
    url = re.sub(r"(:/*[^:/@]*):.*@", r"\1:***@", url)
    return re.sub(r"(?i)(password=)[^&]*", r"\1***", url)


def database_url(pool: str) -> str:
    """Return the URL of a pool that is named by its URL or by the path of its SQLite file."""
    return pool if "://" in pool else f"sqlite:///{Path(pool).absolute()}"


def parsed(url: str) -> URL:
    """Parse a database URL; UserError when it is malformed, or neither SQLite nor PostgreSQL."""
    try:
        address = make_url(url)
    except (ArgumentError, ValueError):  # its text may contain the password
        raise UserError(
            f"{shown(url)} is no database URL; write sqlite:///FILE or postgresql://USER:PASSWORD@HOST:PORT/NAME, "
            "special characters percent-encoded"
        ) from None
    if "@" in (address.host or ""):
        raise UserError(f"the database URL {shown(url)} has more than one @; write those of the password as %40")
    if address.drivername not in DRIVERS:
        raise UserError(f"{shown(url)} is no database that holds pools; use sqlite:///FILE or postgresql://...")
    return address.set(drivername=DRIVERS[address.drivername])
