"""The directories of a run that can be found from its pool: that of the pool's file, and those in it.

A directory counts if its whereabouts.json names the run and the pool, so that no other file is ever read.
"""

from contextlib import suppress
from pathlib import Path

import msgspec

from proxy.pool.address import parsed
from proxy.pool.database import Pool

LOOKED_AT = 200
"""Directories beside the pool that are looked at, the newest ones."""


class _Whereabouts(msgspec.Struct):
    """What a run's directory says of its run."""

    pool: str
    name: str


def run_directories(pool: Pool, run: str) -> list[Path]:
    """Return the directories of a run; none for a pool that is no file, or a run whose directory is elsewhere."""
    address = parsed(pool.url)
    if address.get_backend_name() != "sqlite" or not address.database:
        return []
    home = Path(address.database).absolute().parent
    near = [home]
    with suppress(OSError):
        near += sorted((path for path in home.iterdir() if path.is_dir()), key=_age)[:LOOKED_AT]
    return [directory for directory in near if _names(directory, pool.url, run)]


def _names(directory: Path, url: str, run: str) -> bool:
    with suppress(OSError, msgspec.DecodeError):
        where = msgspec.json.decode((directory / "whereabouts.json").read_bytes(), type=_Whereabouts)
        return where.name == run and where.pool == url
    return False


def _age(path: Path) -> float:
    return -path.stat().st_mtime
