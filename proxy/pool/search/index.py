"""The index file: an SQLite database of its own with the words of calls (FTS5) and what rollouts are filtered by.

It holds no text, only which words stand where; what is shown is read from the pool. It can be deleted at any time: the
dashboard builds it again. Left out: tokens, and whole tool results, which the pool does not hold as text. How it is
filled: build.py; how it is asked: query.py.
"""

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from proxy.pool.address import parsed

VERSION = 2
"""Version of SCHEMA, and of the rules by which events are found. An index of another version is built again."""
CACHE_KIB = 16 << 10
"""Memory for pages of the file, per connection of a builder."""
BUSY_SECONDS = 10
"""How long a statement waits for another connection's lock."""
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
    """Return the file of a pool's index: beside a SQLite file, else in the user's cache under a digest of the URL."""
    address = parsed(pool_url)
    if address.get_backend_name() == "sqlite" and address.database:
        return Path(f"{Path(address.database).absolute()}.search")
    named = address.set(password=None).render_as_string()  # a new password does not make it another pool
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "blackforge" / "search" / f"{hashlib.sha256(named.encode()).hexdigest()[:16]}.search"


def open_writer(file: Path) -> sqlite3.Connection:
    """Open the index for its builder. Make it again if it is missing, damaged or of another version.

    Call it with the lock of the file (proxy/dashboard/indexer.py). sqlite3.Error or OSError when that fails.
    """
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    connection = _connected(file)
    try:
        if _is_current(connection):
            _set_up(connection)
            return connection
        connection.close()
        for ending in ("", "-wal", "-shm"):
            Path(f"{file}{ending}").unlink(missing_ok=True)
        connection = _connected(file)
        _set_up(connection)
        connection.executescript(f"begin; {SCHEMA} insert into meta values ('version', {VERSION}); commit")
        return connection
    except BaseException:  # whatever it was: nobody else would close it
        connection.close()
        raise


@contextmanager
def reading(file: Path) -> Iterator[sqlite3.Connection | None]:
    """Open the index for one question. None: there is none of this version (yet), or it cannot be read."""
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
    """Return a number that the builder has put under a name with `keep`; None: it has not."""
    row = connection.execute("select value from meta where name = ?", (name,)).fetchone()
    return None if row is None else row[0]


def keep(connection: sqlite3.Connection, name: str, value: float) -> None:
    """Put a number under a name, in place of an earlier one: how far the builder is, for itself and for `progress`."""
    connection.execute("insert or replace into meta values (?, ?)", (name, value))


def _connected(file: Path) -> sqlite3.Connection:
    os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))  # SQLite would make it with the permissions of our umask
    connection = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None)
    connection.row_factory = sqlite3.Row
    return connection


def _set_up(connection: sqlite3.Connection) -> None:
    """Let questions read while a builder writes, and let a power cut lose the last pieces but damage nothing."""
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", f"cache_size=-{CACHE_KIB}"):  # negative: in KiB
        connection.execute(f"PRAGMA {pragma}")


def _is_current(connection: sqlite3.Connection) -> bool:
    """Whether it is an index of this version; False for a damaged file, too."""
    try:
        return _version(connection) == VERSION
    except sqlite3.OperationalError:  # locked, or no access: this says nothing about the content
        raise
    except sqlite3.DatabaseError:
        return False


def _version(connection: sqlite3.Connection) -> float | None:
    known = connection.execute("select 1 from sqlite_master where name = 'meta'").fetchone()
    return meta(connection, "version") if known else None
