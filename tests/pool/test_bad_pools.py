"""Databases that take no writes, are full, or are of another blackforge: one sentence each, and nothing is lost."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from harness.run_dir import Whereabouts
from proxy.engine.tiny_model import make_tiny_model
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import PoolWriteError, UserError
from proxy.pool.inspect.account import account
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.runs import open_run, record_event
from proxy.pool.training.steps import Published, latest, publish
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from tests.conftest import need
from tests.pool.full_disk import full_disk
from tests.pool.make import finished_group
from tests.postgres import Server
from trainer.config.step import StepOptions
from trainer.data.assemble import assemble

STEP = Published(step=0, checkpoint="c", hf_dir="h", metrics={})
RULE = LeaseRule(groups=1, window=4, max_staleness=9)
COMMANDS = """
import os, sys, tempfile
from harness.cli import main as harness
from proxy.commands.main import main as proxy
from trainer.commands.main import main as trainer
here, pool = sys.argv[1:]
os.chdir(here)
reads = (["verify", pool], ["show", pool, "1"], ["account", pool, "r"], ["events", pool])
writes = (["export", pool, "r", "--output", "o.jsonl"], ["archive", pool, "r", "--older-than", "1", "--to", "a"])
calls = [(proxy, ["pool", *words]) for words in (*reads, *writes)]
calls += [(proxy, ["serve", "serve.toml", "--engine", "http://127.0.0.1:9"]), (trainer, ["launch", "train.toml"])]
calls += [(trainer, ["rollback", "train.toml", "--to", "0"]), (harness, ["watch", "runs"])]
for main, words in calls:
    with tempfile.TemporaryFile() as said:  # the trainer's ranks write to it, too
        os.dup2(said.fileno(), 2)
        status = main(words)
        said.seek(0)
        print(status, said.read().decode().rstrip().replace(chr(10), "|"))
"""


def write_settings(directory: Path, pool: Path) -> None:
    make_tiny_model(directory / "tiny")
    (directory / "serve.toml").write_text(f'pool = "{pool}"\n[engine]\nmodel = "tiny"\n')
    train = f'pool = "{pool}"\nrun = "r"\nmodel = "tiny"\noutput = "out"\nsteps = 1\n'
    run = directory / "runs"
    run.mkdir()
    (run / "whereabouts.json").write_bytes(msgspec.json.encode(Whereabouts(pool=str(pool), name="r", expected=None)))
    (directory / "train.toml").write_text(train + '[push]\nengines = ["http://127.0.0.1:9"]\n')


def refusals(directory: Path, pool: Path, before: tuple[str, ...] = ()) -> list[str]:
    """What each command says of a pool; root obeys file modes only after `before` has taken its capabilities."""
    command = [*before, sys.executable, "-c", COMMANDS, str(directory), str(pool)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.mark.long
def test_every_command_says_in_one_sentence_why_it_cannot_use_a_pool(tmp_path: Path) -> None:
    home = tmp_path / "read-only"
    home.mkdir()
    pool = open_pool(str(file := home / "pool.db"))
    finished_group(pool, open_run(pool, "r", "train", {}).id, [1.0, 0.0])
    pool.close()
    write_settings(tmp_path, file)
    content = file.read_bytes()
    file.chmod(0o444)
    home.chmod(0o555)
    said = refusals(tmp_path, file, ("setpriv", "--bounding-set=-all", "--inh-caps=-all"))
    home.chmod(0o755)
    for line in said:
        assert line.startswith("2 error: the pool sqlite:///") and "|" not in line
        assert "cannot be opened (attempt to write a readonly database); name a writable SQLite file" in line
    assert len(said) == 10 and file.read_bytes() == content
    file.chmod(0o600)
    with (pool := open_pool(str(file))).write() as connection:
        connection.execute(text("update alembic_version set version_num = '9999'"))
    pool.close()
    content = file.read_bytes()
    for line in refusals(tmp_path, file):
        assert line.startswith("2 error: the pool sqlite:///") and "|" not in line
        assert "has schema 9999, newer than this blackforge's" in line and "or name another pool" in line
    assert file.read_bytes() == content


def test_a_user_without_rights_is_one_sentence(postgres_server: Server) -> None:
    pool = open_pool(database := postgres_server.database())
    name, run = f"reader_{database.rpartition('_')[2]}", open_run(pool, "r", "train", {})
    finished_group(pool, run.id, [1.0, 0.0])
    postgres_server.execute(f"create role {name} login password 'secret'")
    url = database.replace(f"blackforge:{postgres_server.password}@", f"{name}:secret@")
    with pytest.raises(UserError, match=r"cannot be opened \(permission denied"):
        open_pool(url)
    with pool.write() as connection:
        connection.execute(text(f"grant select on all tables in schema public to {name}"))
    reader = open_pool(url)
    assert account(reader, run.id) == account(pool, run.id) and verify(reader).damages == []
    with pytest.raises(PoolWriteError, match=r"permission denied for table events.*let this user write"):
        record_event(reader, None, "note", "x")
    for each in (reader, pool):
        each.close()


@contextmanager
def full_tablespace(database: str) -> Iterator[None]:
    """Fill the file system that holds a PostgreSQL database, and empty it again after the block."""
    engine = create_engine(database, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(text("create table filler (bytes bytea)"))
        connection.execute(text("alter table filler alter bytes set storage external"))
        with pytest.raises(OperationalError, match="No space left on device"):
            while True:
                connection.execute(text("insert into filler select decode(repeat('00', 8000), 'hex')"))
        yield
        connection.execute(text("drop table filler"))
    engine.dispose()


@pytest.fixture
def small_database(postgres_server: Server) -> Iterator[str]:
    """A PostgreSQL database in a file system of 32 MiB."""
    need("root, who may mount a file system", os.geteuid() == 0)
    place = Path(tempfile.mkdtemp(prefix="blackforge-small-"))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,mode=700", "tmpfs", place]).returncode == 0
    try:
        need("a file system of its own (mount -t tmpfs)", mounted)
        shutil.chown(place, "postgres", "postgres")
        yield (database := postgres_server.database(place))
        postgres_server.drop(database)
    finally:
        subprocess.run(["umount", place], check=mounted)
        place.rmdir()


def survives_full(pool: Pool, full: AbstractContextManager[None], cause: str) -> None:
    """Publish a step while there is no room, which is one sentence and changes nothing; then publish it."""
    run = open_run(pool, "r", "train", {})
    version = publish(pool, run.id, STEP)
    for _ in range(3):
        finished_group(pool, run.id, [1.0, 0.0])
    leased = lease(pool, run.id, 1, RULE)
    assert leased is not None
    fates = [fate.to_pool() for fate in assemble(leased.groups, StepOptions()).fates]
    step = replace(STEP, step=1, parent=version.id, fates=fates, metrics={"much": os.urandom(50_000).hex()})
    before = account(pool, run.id)
    with full:
        with pytest.raises(PoolWriteError, match=rf"refused a write \({cause}.*\); free space"):
            publish(pool, run.id, step)
        assert account(pool, run.id) == before and latest(pool, run.id) == version
    assert lease(pool, run.id, 1, RULE) == leased
    assert publish(pool, run.id, step).step == 1 and account(pool, run.id).trained.tokens == 4
    assert verify(pool).damages == []
    pool.close()


def test_a_step_that_finds_the_pool_full_is_published_later(tmp_path: Path) -> None:
    survives_full(open_pool(str(tmp_path / "pool.db")), full_disk(), "database or disk is full")


@pytest.mark.long
def test_so_it_is_where_postgresql_has_no_room(small_database: str) -> None:
    survives_full(open_pool(small_database), full_tablespace(small_database), "could not extend file")
