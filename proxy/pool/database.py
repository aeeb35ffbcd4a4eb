"""The connection to a pool: opening, transactions, schema version. SQLite and PostgreSQL run the same code.

SQLite runs in WAL mode with synchronous=NORMAL: a commit survives kill -9 of every process; a power failure may lose
the last commits but never damages the file. It allows one writer at a time. PostgreSQL allows several, so a transaction
that reads before it writes first locks the row that decides (`locked`): the run for its queue, leases and versions, the
attempt for its completions. Locks are always taken in the order run, rollout, attempts by id, which avoids deadlocks.
No message contains the password.
"""

import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
from sqlalchemy import Connection, Row, Select, Table, create_engine, event, insert, inspect, select, text
from sqlalchemy.engine import URL, Engine
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, NotSupportedError, ProgrammingError
from sqlalchemy.exc import TimeoutError as NoConnectionLeft

from proxy.pool.address import database_url, parsed, shown
from proxy.pool.errors import PoolConflict, PoolError, PoolReadError, PoolWriteError, UserError
from proxy.pool.schema import ROWS, metadata, storable
from proxy.pool.sqlite_file import PoolFile, PoolFileLost, make_private
from proxy.pool.views import drop_views, make_views

HEAD = "0036"
"""The schema revision this code reads and writes (proxy/pool/migrations/versions)."""

BUSY_SECONDS = 60
"""Maximum wait of a transaction for the lock of another one."""
PAGE_BYTES = 1024
"""Page size of a new SQLite file. A completion has a few KB; with pages of 4096 bytes it takes a thirtieth more."""
TRIES = 8
"""Maximum tries of a transaction that the database aborts in favour of another one."""
MIGRATION_LOCK = 0x626C6163
"""The advisory lock of migrations on PostgreSQL."""

READ: dict[str, dict[str, Any]] = {
    "sqlite": {},
    "postgresql": {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True},
}
WRITE: dict[str, dict[str, Any]] = {
    "sqlite": {"begin": "BEGIN IMMEDIATE"},
    "postgresql": {"isolation_level": "READ COMMITTED"},  # so that a locked row shows the latest commit
}
CONFLICTS = ("40001", "40P01")
"""PostgreSQL's codes for a serialization failure and a deadlock."""
BUGS = (
    *(DataError, IntegrityError, NotSupportedError, ProgrammingError),
    *(sqlite3.DataError, sqlite3.IntegrityError, sqlite3.NotSupportedError, sqlite3.ProgrammingError),
)
"""Errors of a statement that is at fault: as SQLAlchemy raises them, and as SQLite's driver does."""
NO_RIGHT = "42501"
"""PostgreSQL's code for a user who may not do this. The driver files it among the faulty statements."""

P = ParamSpec("P")
T = TypeVar("T")


class Pool:
    """One database. Safe from any thread: every method opens its own transaction. `name` is for messages."""

    def __init__(self, url: str, engine: Engine, file: PoolFile | None = None):
        self.url = url
        self.name = shown(url)
        self.dialect = engine.dialect.name
        self._engine = engine
        self._file = file

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a read transaction, one consistent snapshot. PoolReadError when the database does not answer."""
        try:
            with self._engine.connect().execution_options(**READ[self.dialect]) as connection:
                yield connection
        except (DBAPIError, NoConnectionLeft, sqlite3.Error) as error:
            if _is_a_bug(error):
                raise
            raise PoolReadError(f"the pool {self.name} cannot be read ({_cause(error)}); bring it back") from error

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a write transaction, committed at the end of the block. PoolWriteError when it cannot be stored, or was
        stored in a file that is no longer the pool's."""
        try:
            with self._engine.connect().execution_options(**WRITE[self.dialect]) as connection:
                with connection.begin():
                    yield connection
                    self._check_file(connection)
                self._check_file(connection)
        except PoolFileLost as error:
            raise PoolWriteError(f"the pool {self.name} did not keep a write ({error})") from error
        except (DBAPIError, NoConnectionLeft, sqlite3.Error) as error:
            if _is_a_bug(error):
                raise
            kind = PoolConflict if _state(error) in CONFLICTS else PoolWriteError
            raise kind(
                f"the pool {self.name} refused a write ({_cause(error)}); free space, unlock it or let this user write"
            ) from error

    def close(self) -> None:
        self._engine.dispose()

    def _check_file(self, connection: Connection) -> None:
        if self._file:
            self._file.check(connection.info)


def _is_a_bug(error: Exception) -> bool:
    """Whether the statement is at fault and not the database."""
    return isinstance(error, BUGS) and _state(error) != NO_RIGHT


def _state(error: Exception) -> str | None:
    """Return PostgreSQL's code of an error; None for those of others."""
    return getattr(error.orig, "sqlstate", None) if isinstance(error, DBAPIError) else None


def _cause(error: BaseException) -> str:
    cause = error.orig if isinstance(error, DBAPIError) else error
    return " ".join(str(cause).split())


def retried(work: Callable[P, T]) -> Callable[P, T]:
    """Repeat a function of one transaction when the database aborted it in favour of another one."""

    @wraps(work)
    def repeat(*args: P.args, **kwargs: P.kwargs) -> T:
        for past in range(TRIES - 1):
            try:
                return work(*args, **kwargs)
            except PoolConflict:
                time.sleep(random.uniform(0, 0.01 * 2**past))
        return work(*args, **kwargs)

    return repeat


def locked(connection: Connection, query: Select[Any]) -> list[Row[Any]]:
    """Return the rows of a query, in its order, locked until the transaction ends. SQLite needs none."""
    return list(connection.execute(for_update(query)))


def lock_row(connection: Connection, table: Table, row_id: int) -> None:
    """Lock one row until the transaction ends. SQLite needs no lock: its writing transactions come one by one."""
    if connection.dialect.name != "sqlite":
        connection.execute(for_update(select(table.c.id).where(table.c.id == row_id)))


def for_update(query: Select[Any]) -> Select[Any]:
    """Return the query with a lock on its rows.

    It is FOR NO KEY UPDATE, which lets other transactions insert rows that refer to the locked ones.
    """
    return query.with_for_update(key_share=True)


def insert_row(connection: Connection, table: Table, values: dict[str, Any]) -> int:
    """Insert one row and return its id."""
    key = connection.execute(insert(table), values).inserted_primary_key  # so that SQLAlchemy compiles it once
    assert key is not None
    return int(key[0])


def insert_if_new(connection: Connection, table: Table, values: dict[str, Any]) -> int | None:
    """Insert one row and return its id; None when a row with the same unique value exists."""
    try:
        with connection.begin_nested():
            return insert_row(connection, table, values)
    except IntegrityError:
        return None


def open_pool(url: str, create: bool = True, read_only: bool = False) -> Pool:
    """Open the pool at a database URL or SQLite file path, bringing its schema up to date.

    `read_only`: the database refuses every write of this connection. Nothing is created or brought up to date.

    Raises UserError when the database cannot be opened, was written by a newer blackforge (or, with `read_only`, by an
    older one), or, without `create`, holds no pool.
    """
    url = database_url(url)
    address = parsed(url)
    file = Path(address.database) if address.get_backend_name() == "sqlite" and address.database else None
    guard = PoolFile(file) if file else None
    pool = Pool(url, _engine(address, guard, read_only), guard)
    try:
        missing = read_only or not create
        if missing and not (file.is_file() and _holds_pool(file) if file else _holds_tables(pool)):
            raise UserError(f"{pool.name} holds no pool; name the SQLite file or database URL of one")
        if read_only:
            _demand_newest(pool)
            return pool
        if file:
            file.parent.mkdir(parents=True, exist_ok=True)
            make_private(file, create)
        _migrate(pool)
    except (DBAPIError, PoolError, OSError, sqlite3.Error) as error:
        cause = error.__cause__ if isinstance(error, PoolError) and error.__cause__ else error
        raise UserError(
            f"the pool {pool.name} cannot be opened ({_masked(_cause(cause), address)}); "
            "name a writable SQLite file or a database URL"
        ) from error
    return pool


def demand_reachable(url: str) -> None:
    """UserError unless a pool can be opened or made at this URL or path. Changes nothing."""
    url = database_url(url)
    address = parsed(url)
    if address.get_backend_name() == "sqlite" and address.database:
        file = Path(address.database)
        place = next(path for path in (file, *file.absolute().parents) if path.exists())
        if not os.access(place, os.W_OK):
            raise UserError(f"the pool {shown(url)} cannot be written; name a writable SQLite file or a database URL")
        return
    engine = _engine(address, None, False)
    try:
        with engine.connect() as connection:
            connection.execute(text("select 1"))
    except DBAPIError as error:
        raise UserError(
            f"the pool {shown(url)} cannot be reached ({_masked(_cause(error), address)}); start the database or name "
            "another one"
        ) from error
    finally:
        engine.dispose()


def _masked(message: str, address: URL) -> str:
    return message.replace(str(address.password), "***") if address.password else message


def _holds_pool(file: Path) -> bool:
    """Whether a file is a pool. Does not write to it."""
    with closing(sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)) as connection:
        query = "select count(*) from sqlite_master where name = 'alembic_version'"
        return connection.execute(query).fetchone() == (1,)


def _holds_tables(pool: Pool) -> bool:
    with pool.read() as connection:
        return _revision(connection) is not None


def _demand_newest(pool: Pool) -> None:
    with pool.read() as connection:
        revision = _revision(connection)
    if revision != HEAD:
        raise UserError(
            f"the pool {pool.name} has schema {revision}, and this blackforge reads {HEAD} where it may not write; "
            f"`proxy pool verify {pool.name}` brings an older one up to date"
        )


def _engine(address: URL, guard: PoolFile | None, read_only: bool) -> Engine:
    sqlite = address.get_backend_name() == "sqlite"
    options: dict[str, Any] = {} if sqlite else {"pool_pre_ping": True, "connect_args": _postgres_settings(address)}
    if read_only and not sqlite:
        options["execution_options"] = {"postgresql_readonly": True}
    try:
        engine = create_engine(
            address, json_serializer=_to_json, json_deserializer=msgspec.json.decode, hide_parameters=True, **options
        )
    except ModuleNotFoundError as error:
        raise UserError(
            f"the pool {shown(str(address))} needs the driver {error.name}; install blackforge[postgres]"
        ) from error
    if sqlite:
        event.listen(engine, "connect", _configure_reader if read_only else _configure_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        if guard:
            event.listen(engine, "do_connect", guard.connecting)
            event.listen(engine, "connect", guard.connected)
    return engine


def _postgres_settings(address: URL) -> dict[str, Any]:
    """Return connection settings that the URL does not name: limits on waiting for locks and on idle transactions."""
    limit = BUSY_SECONDS * 1000
    settings = {"connect_timeout": 10, "options": ""}
    settings["options"] = f"-c lock_timeout={limit} -c idle_in_transaction_session_timeout={limit}"
    return {name: value for name, value in settings.items() if name not in address.query}


def _to_json(value: Any) -> str:
    """Encode a value. Lone surrogates in its texts are replaced as `FreeText` does."""
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return msgspec.json.encode(_with_marks(msgspec.to_builtins(value))).decode()


def _with_marks(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {_with_marks(name): _with_marks(item) for name, item in value.items()}
    return [_with_marks(item) for item in value] if isinstance(value, list | tuple) else value


def _configure_sqlite(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None  # SQLAlchemy's begin event opens the transactions instead of the driver
    for pragma in (
        f"busy_timeout={BUSY_SECONDS * 1000}",
        f"page_size={PAGE_BYTES}",
        "synchronous=NORMAL",
        "foreign_keys=ON",
    ):
        connection.execute(f"PRAGMA {pragma}")
    _write_ahead(connection)


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Put the file in WAL mode. SQLite does not wait for a lock here: two processes that open a new file at the same
    time would wait for each other, so it fails one of them at once, whatever `busy_timeout` says."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        time.sleep(random.uniform(0, 0.01))


def _configure_reader(connection: sqlite3.Connection, _record: object) -> None:
    connection.isolation_level = None
    for pragma in (f"busy_timeout={BUSY_SECONDS * 1000}", "query_only=ON"):
        connection.execute(f"PRAGMA {pragma}")


def _begin_sqlite(connection: Connection) -> None:
    driver = connection.connection.driver_connection  # SQLAlchemy would take longer over these words than SQLite
    assert driver is not None, "a connection that begins a transaction has its driver's"
    driver.execute(connection.get_execution_options().get("begin", "BEGIN"))


def _migrate(pool: Pool) -> None:
    with pool.read() as connection:
        if _revision(connection) == HEAD:
            return
    with pool.write() as connection:
        # Two processes may start at once. SQLite has one writer at a time; PostgreSQL needs a lock.
        if pool.dialect == "postgresql":
            connection.execute(text("select pg_advisory_xact_lock(:name)"), {"name": MIGRATION_LOCK})
        revision = _revision(connection)
        if revision == HEAD:
            return
        known = {file.name[:4] for file in (Path(__file__).parent / "migrations" / "versions").glob("[0-9]*.py")}
        if revision is not None and revision not in known:
            raise UserError(
                f"the pool {pool.name} has schema {revision}, newer than this blackforge's {HEAD}; "
                "upgrade blackforge or name another pool"
            )
        if revision is None:
            _create(connection)
        else:
            drop_views(connection)
            upgrade(connection, HEAD)
        make_views(connection)


def _create(connection: Connection) -> None:
    """Make the tables of a new pool at once. They are those that all migrations make, which take several times as long,
    and Alembic a third of a second to import."""
    for index in chain.from_iterable(table.indexes for table in metadata.tables.values()):
        if ROWS in index.info:
            index.dialect_options[connection.dialect.name]["where"] = index.info[ROWS]
    metadata.create_all(connection, checkfirst=False)  # what has these names is refused, not taken for ours
    # Alembic's own table, from which the next migration goes on
    connection.execute(text("create table alembic_version (version_num varchar(32) not null primary key)"))
    connection.execute(text("insert into alembic_version values (:head)"), {"head": HEAD})


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("select version_num from alembic_version")).scalar()


def upgrade(connection: Connection, revision: str) -> None:
    """Migrate a database to a schema revision, in the transaction of this connection."""
    from alembic import command  # takes a third of a second to import, and an up-to-date pool does not need it
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    config.attributes["connection"] = connection
    command.upgrade(config, revision)
