"""One harness at a time works at a run."""

import signal
import subprocess
import sys

import msgspec
import pytest
from sqlalchemy import select, update

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.run_status import run_status
from proxy.pool.processes.owners import STALE_SECONDS, owned
from proxy.pool.rollouts.runs import Run, open_run
from proxy.pool.schema import runs

HOLDER = """
import sys, time
from proxy.pool.database import open_pool
from proxy.pool.processes.owners import owned
from proxy.pool.rollouts.runs import find_run
pool = open_pool(sys.argv[1])
with owned(pool, find_run(pool, "r")):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def run(pool: Pool) -> Run:
    return open_run(pool, "r", "train", {})


def owner_of(pool: Pool) -> dict[str, str | int] | None:
    with pool.read() as connection:
        return connection.scalar(select(runs.c.owner))


def test_a_run_is_given_back(pool: Pool, run: Run) -> None:
    with owned(pool, run) as claim:
        assert claim.renew() and owner_of(pool) is not None
        with pytest.raises(UserError, match="run 'r' of the pool .* is in use by process"), owned(pool, run):
            pass
    assert owner_of(pool) is None and not claim.renew()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_living_process_keeps_its_run_and_a_killed_one_does_not(pool: Pool, run: Run, number: signal.Signals) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, pool.url], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on "), owned(pool, run):
            pass
        assert run_status(pool, run.id).owner is not None
        holder.send_signal(number)
        if number == signal.SIGKILL:
            holder.wait()
            assert run_status(pool, run.id).owner is None  # so that nobody watches a dead run for ever
            with owned(pool, run):
                return
        age(pool, STALE_SECONDS + 1)
        with pytest.raises(UserError, match="in use by process"), owned(pool, run):
            pass
    finally:
        holder.kill()
        holder.communicate()


def age(pool: Pool, seconds: float) -> None:
    with pool.write() as connection:
        connection.execute(update(runs).values(owner_seen_at=runs.c.owner_seen_at - seconds))


def test_an_owner_elsewhere_is_believed_until_it_falls_silent(pool: Pool, run: Run) -> None:
    with owned(pool, run) as first:
        elsewhere = owner_of(pool)
        assert elsewhere is not None
        with pool.write() as connection:
            connection.execute(update(runs).values(owner=elsewhere | {"machine": "another", "host": "far"}))
        with pytest.raises(UserError, match="on far"), owned(pool, run):
            pass
        age(pool, STALE_SECONDS + 1)
        with owned(pool, run):
            assert not first.renew()
            assert msgspec.json.encode(owner_of(pool)) != msgspec.json.encode(elsewhere)
