"""The index file: an SQLite database of its own with the words of calls (FTS5) and what is searched of rollouts.

It holds no text, only which words stand where; what is shown is read from the pool. It can be deleted at any time: it
is built again. Left out: tokens, whole tool results, which the pool does not hold as text.
"""

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from proxy.pool.address import parsed

VERSION = 2
"""Version of the tables below, and of the rules for events. An index of another version is built again."""
CACHE_KIB = 16 << 10
BUSY_SECONDS = 10
SCHEMA = """
create table meta (name text primary key, value) without rowid;
create virtual table words using fts5 (reply, results, content='', tokenize='unicode61');
create table calls (id integer primary key, attempt_id integer not null, rollout_id integer, run_id integer);
create table outcomes (
    rollout_id integer primary key, run_id integer not null, group_id integer not null, agent text, domain text,
    task text, reward real, failure text, calls integer, tokens integer, seconds real, finished_at real
);
create index outcomes_run on outcomes (run_id, rollout_id);
create index outcomes_failure on outcomes (failure, rollout_id);
create table events (kind text not null, rollout_id integer not null, count integer not null,
    primary key (kind, rollout_id)) without rowid;
create index events_rollout on events (rollout_id);
"""


def place_of(pool_url: str) -> Path:
    """Return the file of a pool's index: beside a SQLite file, else in the user's cache."""
    address = parsed(pool_url)
    if address.get_backend_name() == "sqlite" and address.database:
        return Path(f"{Path(address.database).absolute()}.search")
    named = address.set(password=None).render_as_string()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "blackforge" / "search" / f"{hashlib.sha256(named.encode()).hexdigest()[:16]}.search"


def open_writer(file: Path) -> sqlite3.Connection:
    """Open the index for its builder; make it if it is missing or of another version. sqlite3.Error, OSError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    connection = _connected(file)
    if _version(connection) == VERSION:
        return connection
    connection.close()
    for ending in ("", "-wal", "-shm"):
        Path(f"{file}{ending}").unlink(missing_ok=True)
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    connection = _connected(file)
    connection.executescript(f"begin; {SCHEMA} insert into meta values ('version', {VERSION}); commit")
    return connection


@contextmanager
def reading(file: Path) -> Iterator[sqlite3.Connection | None]:
    """Open the index for one question; None where there is none (yet)."""
    try:
        connection = sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True, timeout=BUSY_SECONDS)
    except sqlite3.Error:
        yield None
        return
    connection.row_factory = sqlite3.Row
    try:
        known = False
        with suppress(sqlite3.Error):
            known = _version(connection) == VERSION
        yield connection if known else None
    finally:
        connection.close()


def meta(connection: sqlite3.Connection, name: str) -> float | None:
    """Return a number that the builder keeps; None: it has not kept it."""
    row = connection.execute("select value from meta where name = ?", (name,)).fetchone()
    return None if row is None else row[0]


def keep(connection: sqlite3.Connection, name: str, value: float) -> None:
    """Keep a number for the builder."""
    connection.execute("insert or replace into meta values (?, ?)", (name, value))


def _connected(file: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"cache_size=-{CACHE_KIB}"):
        connection.execute(f"PRAGMA {pragma}")
    connection.row_factory = sqlite3.Row
    return connection


def _version(connection: sqlite3.Connection) -> float | None:
    known = connection.execute("select 1 from sqlite_master where name = 'meta'").fetchone()
    return meta(connection, "version") if known else None
