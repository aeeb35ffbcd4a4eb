"""Opening pools: migrations, newer schemas, disk full."""

import shutil
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, create_engine, inspect, select, text

from proxy.pool.database import HEAD, Pool, locked, open_pool, retried, upgrade
from proxy.pool.errors import PoolReadError, PoolWriteError, UserError
from proxy.pool.rollouts.runs import find_run, open_run, record_event, set_queue_limit
from proxy.pool.schema import metadata, runs
from tests.pool.full_disk import full_disk
from tests.postgres import Server


def test_migrations_make_exactly_the_tables_of_a_new_pool(database: str) -> None:
    engine = create_engine(database)
    with engine.begin() as connection:
        upgrade(connection, HEAD)
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []
        migrated = tables(connection)
        metadata.drop_all(connection)
        connection.execute(text("drop table alembic_version"))
    with open_pool(database).read() as connection:
        assert tables(connection) == migrated
        assert connection.execute(text("select version_num from alembic_version")).scalar() == HEAD
    engine.dispose()


def tables(connection: Connection) -> dict[str, Any]:
    """All that the database says of its tables, but for the order of their columns."""
    seen = inspect(connection)

    def checks(table: str) -> list[tuple[str, str]]:
        return sorted(
            (str(each["name"]), " ".join(each["sqltext"].split())) for each in seen.get_check_constraints(table)
        )

    def index(each: Any) -> str:
        options = {name: str(value) for name, value in each.get("dialect_options", {}).items()}  # such as its `where`
        return repr((each["name"], each["column_names"], bool(each["unique"]), options))

    return {
        name: {
            "columns": {
                column["name"]: (str(column["type"]), column["nullable"], column["default"])
                for column in seen.get_columns(name)
            },
            "key": seen.get_pk_constraint(name)["constrained_columns"],
            "references": sorted(map(repr, seen.get_foreign_keys(name))),
            "never again": "AUTOINCREMENT" in (_text(connection, name) or ""),
            "unique": sorted(sorted(each["column_names"]) for each in seen.get_unique_constraints(name)),
            "indexes": sorted(map(index, seen.get_indexes(name))),
            "checks": checks(name),
        }
        for name in seen.get_table_names()
    }


def _text(connection: Connection, table: str) -> str | None:
    """SQLite's text of a table, which alone says whether ids are never used again."""
    if connection.dialect.name != "sqlite":
        return None
    query = text("select sql from sqlite_master where type = 'table' and name = :name")
    return connection.execute(query, {"name": table}).scalar()


def test_a_database_with_tables_of_another_program_is_refused(database: str) -> None:
    engine = create_engine(database)
    with engine.begin() as connection:
        connection.execute(text("create table runs (run_uuid varchar(32))"))
    engine.dispose()
    with pytest.raises(UserError, match="cannot be opened .*runs.* already exists"):
        open_pool(database)


def test_opening_twice_keeps_the_data(database: str) -> None:
    run = open_run(open_pool(database), "r", "train", {})
    assert open_run(open_pool(database), "r", "train", {}) == run


def test_a_pool_of_the_first_schema_is_brought_up_to_date_and_keeps_its_data(database: str) -> None:
    engine = create_engine(database)
    with engine.begin() as connection:
        upgrade(connection, "0001")
        connection.execute(text("insert into runs (name, purpose, config, created_at) values ('r', 'eval', '{}', 1)"))
    pool = open_pool(database)
    assert find_run(pool, "r").purpose == "eval"
    with pool.read() as connection:
        assert compare_metadata(MigrationContext.configure(connection), metadata) == []


def test_starters_at_the_same_time_make_one_pool(database: str) -> None:
    with ThreadPoolExecutor(6) as threads:
        opened = list(threads.map(open_pool, [database] * 6))
    record_event(opened[0], None, "note", "here")
    with opened[5].read() as connection:
        assert connection.execute(text("select detail from events")).scalar_one() == "here"


def test_a_new_file_that_another_process_locks_is_waited_for(tmp_path: Path) -> None:
    file, tried = tmp_path / "pool.db", Event()

    def try_to_open() -> Pool:
        tried.set()
        return open_pool(str(file))

    with closing(sqlite3.connect(file, isolation_level=None)) as other, ThreadPoolExecutor(1) as threads:
        other.execute("begin immediate")
        opening = threads.submit(try_to_open)
        tried.wait()
        with pytest.raises(TimeoutError):
            opening.result(0.5)
        other.execute("rollback")
        record_event(opening.result(), None, "note", "here")


def test_a_pool_of_a_newer_schema_is_refused_and_left_alone(pool: Pool) -> None:
    with pool.write() as connection:
        connection.execute(text("update alembic_version set version_num = '9999'"))
    with pytest.raises(UserError, match=f"schema 9999, newer than this blackforge's {HEAD}; upgrade"):
        open_pool(pool.url)
    with pool.read() as connection:
        assert connection.execute(text("select version_num from alembic_version")).scalar() == "9999"


def test_a_path_that_cannot_hold_a_pool_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(UserError, match="file/p.db cannot be opened"):
        open_pool(str(tmp_path / "file" / "p.db"))


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.db").write_text("hello " * 1000)
    with pytest.raises(UserError, match="p.db cannot be opened"):
        open_pool(str(tmp_path / "p.db"))


def test_a_pool_is_its_owners_alone_also_one_that_was_made_before(tmp_path: Path) -> None:
    file = tmp_path / "pool.db"
    record_event(first := open_pool(str(file)), None, "note", "here")
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == dict.fromkeys(
        ("pool.db", "pool.db-wal", "pool.db-shm"), 0o600
    )
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    open_pool(str(file), create=False).close()
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}
    record_event(first, None, "note", "still here")


@pytest.mark.parametrize("ending", ["", "-wal", "-shm"])
def test_a_file_that_is_moved_fails_writes_until_it_is_back(tmp_path: Path, ending: str) -> None:
    pool, file = open_pool(str(tmp_path / "pool.db")), tmp_path / f"pool.db{ending}"
    record_event(pool, None, "note", "before")
    file.rename(tmp_path / "elsewhere")
    for copy in (False, True):
        if copy:
            shutil.copy(tmp_path / "elsewhere", file)
        with pytest.raises(PoolWriteError, match="was deleted, moved or replaced while it was in use; put it back"):
            record_event(pool, None, "note", "lost")
    (tmp_path / "elsewhere").rename(file)
    record_event(pool, None, "note", "after")
    with pool.read() as connection:
        assert list(connection.execute(text("select detail from events")).scalars()) == ["before", "after"]


def test_a_file_that_is_deleted_is_not_made_again(tmp_path: Path) -> None:
    file = tmp_path / "pool.db"
    pool = open_pool(str(file))
    with pool.read():  # its connection is in use, so the next one is new
        file.unlink()
        with pytest.raises(PoolReadError, match="was deleted, moved or replaced"), pool.read():
            pass
    assert not file.exists()


def test_a_lock_that_another_process_keeps_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.pool.database.BUSY_SECONDS", 0)
    pool = open_pool(str(tmp_path / "pool.db"))
    with closing(sqlite3.connect(tmp_path / "pool.db", isolation_level=None)) as other:
        other.execute("begin immediate")
        with pytest.raises(PoolWriteError, match=r"refused a write \(database is locked\)"):
            record_event(pool, None, "note", "x")
    record_event(pool, None, "note", "x")


def test_a_full_disk_fails_the_write_and_stores_nothing(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    with full_disk(), pytest.raises(PoolWriteError, match="full"):
        record_event(pool, None, "note", "x" * 1_000_000)
    with pool.read() as connection:
        assert connection.execute(text("select count(*) from events")).scalar() == 0


@pytest.fixture
def remote(postgres_server: Server) -> Iterator[Pool]:
    """A pool on PostgreSQL, for what only a server can do."""
    opened = open_pool(postgres_server.database())
    yield opened
    opened.close()


def test_a_connection_that_breaks_is_one_error_and_the_next_transaction_has_a_new_one(remote: Pool) -> None:
    end = text("select pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(PoolWriteError, match="refused a write"), remote.write() as connection:
        connection.execute(end)
    with pytest.raises(PoolReadError, match="cannot be read"), remote.read() as connection:
        connection.execute(end)
    record_event(remote, None, "note", "again")


def test_a_server_that_takes_no_writes_is_named(remote: Pool, postgres_server: Server) -> None:
    name = remote.url.rpartition("/")[2]
    postgres_server.execute(f"alter database {name} set default_transaction_read_only = on")
    remote.close()
    with pytest.raises(PoolWriteError, match="read-only transaction"):
        record_event(remote, None, "note", "x")


def test_transactions_that_lock_each_other_out_are_run_again(remote: Pool) -> None:
    ids = [open_run(remote, name, "train", {}).id for name in "ab"]
    both_hold_one = Barrier(2)
    tries: list[int] = []

    @retried
    def lock_both(order: list[int]) -> None:
        tries.append(order[0])
        with remote.write() as connection:
            locked(connection, select(runs.c.id).where(runs.c.id == order[0]))
            if len(tries) <= 2:
                both_hold_one.wait(10)
            locked(connection, select(runs.c.id).where(runs.c.id == order[1]))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lock_both, [ids, ids[::-1]]))
    assert len(tries) > 2  # the one that is run again may lose again
    set_queue_limit(remote, ids[0], 1)


def test_no_message_shows_the_password(postgres_server: Server, remote: Pool) -> None:
    wrong = remote.url.replace(f":{postgres_server.password}@", ":swordfish@")
    for url in (wrong, remote.url.rpartition("/")[0] + "/missing", remote.url.replace("127.0.0.1", "127.0.0.1:1:2")):
        with pytest.raises(UserError) as refused:
            open_pool(url)
        assert "***" in str(refused.value)
        assert "swordfish" not in str(refused.value) and postgres_server.password not in str(refused.value)
    with pytest.raises(UserError, match=r"blackforge:\*\*\*@127"):
        find_run(remote, "r")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("postgresql://me:s3cret@host:port/pool", "is no database URL"),
        ("postgresql://me:s3cret@x@host/pool", "more than one @; write those of the password as %40"),
        ("mysql://me:s3cret@host/pool", "is no database that holds pools"),
        ("postgresql://127.0.0.1:1/pool?user=me&password=s3cret", "cannot be opened"),
    ],
)
def test_addresses_that_cannot_be_served(url: str, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        open_pool(url)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)
    assert "s3" not in str(refused.value) and "cret" not in str(refused.value)


def test_opening_for_reading_makes_nothing(tmp_path: Path, postgres_server: Server) -> None:
    (tmp_path / "other.db").touch()
    for url in (str(tmp_path / "dir" / "p.db"), str(tmp_path / "other.db"), postgres_server.database()):
        with pytest.raises(UserError, match="holds no pool"):
            open_pool(url, create=False)
    assert [file.name for file in tmp_path.iterdir()] == ["other.db"] and (tmp_path / "other.db").stat().st_size == 0
