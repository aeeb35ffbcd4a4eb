"""The directories of a run that can be found from its pool: the one that the pool names, that of the pool's file, and
those in it.

A directory counts if its whereabouts.json names the run and the pool, so that no other file is ever read, whatever the
pool names. Others may write to such a directory, so what is read there is opened by `open_input` without links.
"""

from contextlib import suppress
from pathlib import Path

import msgspec
from sqlalchemy import select

from proxy.pool.address import parsed
from proxy.pool.browse.snapshot import snapshot
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.input_files import open_input
from proxy.pool.schema import runs

LOOKED_AT = 200
"""Directories beside the pool that are looked at, the newest ones."""
WHEREABOUTS_BYTES = 64 << 10
"""Largest whereabouts.json that is read."""
PORT = 5432
"""Port of a PostgreSQL server whose URL names none."""


class _Whereabouts(msgspec.Struct):
    """What a run's directory says of its run."""

    pool: str
    name: str


def run_directories(pool: Pool, run: str) -> list[Path]:
    """Return the directories of a run on this machine; none where they are elsewhere."""
    with snapshot(pool) as connection:
        named = connection.scalar(select(runs.c.directory).where(runs.c.name == run))
    near = [] if named is None else [Path(named)]
    address = parsed(pool.url)
    if address.get_backend_name() == "sqlite" and address.database:
        home = Path(address.database).absolute().parent
        near.append(home)
        with suppress(OSError):
            near += sorted((path for path in home.iterdir() if path.is_dir()), key=_age)[:LOOKED_AT]
    return [directory for directory in dict.fromkeys(near) if _names(directory, pool.url, run)]


def _names(directory: Path, url: str, run: str) -> bool:
    with suppress(OSError, ValueError, RecursionError, msgspec.DecodeError, UserError):
        with open_input(directory / "whereabouts.json", follow=False) as file:
            content = file.read(WHEREABOUTS_BYTES + 1)
        if len(content) <= WHEREABOUTS_BYTES:
            where = msgspec.json.decode(content, type=_Whereabouts)
            return where.name == run and _same_pool(where.pool, url)
    return False


def _same_pool(url: str, other: str) -> bool:
    """Whether two URLs name one pool. A reader of a server may have a user and options of its own."""
    one, two = parsed(url), parsed(other)
    if one.get_backend_name() == "sqlite":
        return url == other
    return (one.host, one.port or PORT, one.database) == (two.host, two.port or PORT, two.database)


def _age(path: Path) -> float:
    return -path.stat().st_mtime
