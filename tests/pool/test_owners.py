"""One harness at a time works at a run."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import select, update

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.run_status import run_status
from proxy.pool.processes import owners
from proxy.pool.processes.owners import HARNESS, STALE_SECONDS, TRAINER, Role, owned
from proxy.pool.rollouts.attempts import Ending, close_interrupted, close_lost, open_attempt, still_open
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import Run, open_run
from proxy.pool.schema import groups, runs
from proxy.pool.training.steps import Published, latest, publish
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from tests.conftest import need
from tests.pool.make import TASK, finished_group, publish_next

RULE = LeaseRule(groups=1, window=4, max_staleness=9)

HOLDER = """
import sys, time
from proxy.pool.database import open_pool
from proxy.pool.processes import owners
from proxy.pool.rollouts.runs import find_run
pool = open_pool(sys.argv[1])
with owners.owned(pool, find_run(pool, "r"), getattr(owners, sys.argv[2])):
    print("held", flush=True)
    time.sleep(600)
"""
HIDDEN = """
import os
import msgspec
from proxy.pool.processes.owners import STALE_SECONDS, is_alive, this_process
me = this_process()
parent, nobody = (msgspec.structs.replace(me, pid=pid) for pid in (os.getppid(), 1 << 22))
os.setgroups([]), os.setgid(65534), os.setuid(65534)
print(is_alive(parent, me, 0), is_alive(parent, me, STALE_SECONDS + 1), is_alive(nobody, me, 0))
"""
TRAINS = """
import sys, time
from sqlalchemy import select
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.processes import owners
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import runs
from proxy.pool.training import steps, windowed_fifo
owners.HEARTBEAT_SECONDS = 0.01
pool = open_pool(sys.argv[1])
run = find_run(pool, "r")
rule = windowed_fifo.LeaseRule(groups=1, window=4, max_staleness=9)
def seen():
    with pool.read() as connection:
        return connection.scalar(select(runs.c.trainer_seen_at))
with owners.owned(pool, run, owners.TRAINER) as claim:
    first, began = steps.latest(pool, run.id), seen()
    with claim.kept():  # heartbeats come while it works; they end here, or one could be paused in its transaction
        while seen() == began:
            time.sleep(0.01)
    assert windowed_fifo.lease(pool, run.id, 1, rule, claim.token)
    print("held", flush=True)
    sys.stdin.readline()
    done = steps.Published(step=1, checkpoint="old/1", hf_dir="", metrics={}, parent=first.id)
    for work in (
        lambda: windowed_fifo.lease(pool, run.id, 1, rule, claim.token),
        lambda: windowed_fifo.lease(pool, run.id, 2, rule, claim.token),
        lambda: steps.publish(pool, run.id, done, claim.token),
        lambda: steps.mark_pushed(pool, first, claim.token),
        lambda: steps.reopen_after(pool, run.id, 0, claim.token),
        claim.demand,
        claim.renew,
    ):
        try:
            print(work(), flush=True)
        except UserError as error:
            print(error, flush=True)
"""
ROLES = [HARNESS, TRAINER]


@pytest.fixture
def run(pool: Pool) -> Run:
    return open_run(pool, "r", "train", {})


def owner_of(pool: Pool, role: Role = HARNESS) -> dict[str, str | int] | None:
    with pool.read() as connection:
        return connection.scalar(select(runs.c[role.column]))


def test_a_run_is_given_back(pool: Pool, run: Run) -> None:
    for role, other in (ROLES, ROLES[::-1]):
        with owned(pool, run, role) as claim, owned(pool, run, other):
            assert claim.renew() and owner_of(pool, role) is not None
            refusal = f"run 'r' of the pool .* is in use by process .*, a {role.name}; wait for it, .*{role.way_out}"
            with pytest.raises(UserError, match=refusal), owned(pool, run, role):
                pass
        assert owner_of(pool, role) is None and not claim.renew()


@pytest.mark.parametrize(
    ("role", "number"), [("HARNESS", signal.SIGKILL), ("TRAINER", signal.SIGKILL), ("HARNESS", signal.SIGSTOP)]
)
def test_a_living_process_keeps_its_run_and_a_killed_one_does_not(
    pool: Pool, run: Run, role: str, number: signal.Signals
) -> None:
    own = partial(owned, pool, run, TRAINER if role == "TRAINER" else HARNESS)
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, pool.url, role], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"in use by process {holder.pid} on "), own():
            pass
        assert (run_status(pool, run.id).owner is not None) == (role == "HARNESS")
        holder.send_signal(number)
        if number == signal.SIGKILL:
            holder.wait()
            assert run_status(pool, run.id).owner is None  # so that nobody watches a dead run for ever
            with own():
                return
        age(pool, STALE_SECONDS + 1)
        with pytest.raises(UserError, match="in use by process"), own():
            pass
    finally:
        holder.kill()
        holder.communicate()


def test_a_trainer_that_was_replaced_while_it_was_paused_changes_nothing_any_more(pool: Pool, run: Run) -> None:
    first = publish_next(pool, run.id, Published(step=0, checkpoint="c", hf_dir="", metrics={}))
    for _ in range(3):
        finished_group(pool, run.id, [0.0, 1.0], first.name)
    holder = subprocess.Popen(
        [sys.executable, "-c", TRAINS, pool.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another trainer has taken over run 'r'"):
            lease(pool, run.id, 1, RULE)  # also for a caller that owns nothing
        holder.send_signal(signal.SIGSTOP)
        while Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        elsewhere = owner_of(pool, TRAINER)
        assert elsewhere is not None
        with pool.write() as connection:
            silent = {"trainer": elsewhere | {"machine": "another"}, "trainer_seen_at": time.time() - STALE_SECONDS - 9}
            connection.execute(update(runs).values(silent))
        with owned(pool, run, TRAINER) as claim:
            taken = lease(pool, run.id, 1, RULE, claim.token)
            assert taken is not None and [group.queue_index for group in taken.groups] == [0]  # taken over unchanged
            holder.send_signal(signal.SIGCONT)
            output, _ = holder.communicate("go on\n", timeout=60)
            refusals = output.splitlines()
            assert len(refusals) == 7 and refusals.pop() == "False"
            assert all("another trainer has taken over run 'r'" in text for text in refusals)
            assert latest(pool, run.id) == first
            grown = Published(step=1, checkpoint="new/1", hf_dir="", metrics={}, parent=first.id)
            publish(pool, run.id, grown, claim.token)
        assert owner_of(pool, TRAINER) is None
    finally:
        holder.kill()
        holder.communicate()
    with pool.read() as connection:
        states = connection.execute(select(groups.c.state, groups.c.step).order_by(groups.c.queue_index)).all()
    assert [tuple(row) for row in states] == [("CONSUMED", 1), ("DONE", None), ("DONE", None)]


def test_a_step_of_another_branch_is_refused_and_so_is_a_lease_of_a_published_one(pool: Pool, run: Run) -> None:
    first = publish_next(pool, run.id, Published(step=0, checkpoint="c/0", hf_dir="", metrics={}))
    finished_group(pool, run.id, [0.0, 1.0], first.name)
    one = Published(step=1, checkpoint="c/1", hf_dir="", metrics={}, parent=first.id)
    version = publish(pool, run.id, one)
    assert publish(pool, run.id, one) == version  # repeating it changes nothing
    with pytest.raises(UserError, match=r"step 1 of the run is published already, with c/1; start the trainer again"):
        publish(pool, run.id, replace(one, checkpoint="other/1"))
    with pytest.raises(UserError, match=f"step 2 grew from {first.name}, and the newest .* is {version.name}; start"):
        publish(pool, run.id, replace(one, step=2, checkpoint="other/2"))
    with pytest.raises(UserError, match="step 0 of the run is published already, the newest is 1; start the trainer"):
        lease(pool, run.id, 0, RULE)
    assert lease(pool, run.id, 2, RULE) is not None and latest(pool, run.id) == version


def age(pool: Pool, seconds: float) -> None:
    with pool.write() as connection:
        connection.execute(update(runs).values(owner_seen_at=runs.c.owner_seen_at - seconds))


def move_away(pool: Pool) -> dict[str, str | int]:
    """Let the run's harness count as one on another machine; return what it was."""
    here = owner_of(pool)
    assert here is not None
    with pool.write() as connection:
        connection.execute(update(runs).values(owner=here | {"machine": "another", "host": "far"}))
    return here


def test_an_owner_elsewhere_is_believed_until_it_falls_silent(pool: Pool, run: Run) -> None:
    with owned(pool, run) as first:
        here = move_away(pool)
        with pytest.raises(UserError, match="on far"), owned(pool, run):
            pass
        age(pool, STALE_SECONDS + 1)
        with owned(pool, run):
            assert not first.renew()
            assert msgspec.json.encode(owner_of(pool)) != msgspec.json.encode(here)


def test_a_process_that_the_system_hides_from_us_is_believed_until_it_falls_silent() -> None:
    need("unshare, as root (util-linux)", shutil.which("unshare") is not None and os.geteuid() == 0)
    hide = 'mount -t proc -o hidepid=2 proc /proc && "$@"'
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hide, "sh", sys.executable, "-c", HIDDEN], capture_output=True, text=True
    )
    assert result.stdout.split() == ["True", "False", "False"], result.stderr


async def test_a_heartbeat_waits_for_no_other_work(pool: Pool, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owners, "HEARTBEAT_SECONDS", 0.01)
    loop, ended = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    with owned(pool, run) as claim:
        began = seen(pool)
        busy, keeping = asyncio.create_task(asyncio.to_thread(ended.wait)), asyncio.create_task(claim.keep())
        try:
            async with asyncio.timeout(60):
                while seen(pool) == began:
                    await asyncio.sleep(0.01)
        finally:
            ended.set()
            keeping.cancel()
            await asyncio.gather(busy, keeping, return_exceptions=True)


async def test_the_end_of_a_run_waits_for_no_heartbeat(pool: Pool, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may wait for the database, while the loop has sandboxes to remove."""
    monkeypatch.setattr(owners, "HEARTBEAT_SECONDS", 0.0)
    begun, answered, over = threading.Event(), threading.Event(), threading.Event()

    def slow() -> bool:
        begun.set()
        answered.wait(10)
        over.set()
        return True

    with owned(pool, run) as claim:
        monkeypatch.setattr(claim, "renew", slow)
        keeping = asyncio.create_task(claim.keep())
        await asyncio.to_thread(begun.wait)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert not over.is_set()
        answered.set()


def seen(pool: Pool) -> float | None:
    with pool.read() as connection:
        return connection.scalar(select(runs.c.owner_seen_at))


def test_a_harness_that_was_replaced_closes_no_attempts(pool: Pool, run: Run) -> None:
    [rollout] = open_group(pool, run.id, TASK, 1)
    lost = Ending(failure="interrupted")

    def closed_by(owner: str) -> tuple[list[int], int, list[int]]:
        found = still_open(pool, owner, run_id=run.id)
        assert found == still_open(pool, owner, rollout_id=rollout.rollout_id)
        return found, close_interrupted(pool, run.id, owner), close_lost(pool, rollout.rollout_id, owner, lost)

    with owned(pool, run) as first:
        mine, _ = open_attempt(pool, rollout.rollout_id, "command")
        assert closed_by("") == ([], 0, [])
        assert closed_by(first.token) == ([mine.id], 1, [])
        move_away(pool)
        age(pool, STALE_SECONDS + 1)
        with owned(pool, run) as second:
            theirs, _ = open_attempt(pool, rollout.rollout_id, "command")
            assert closed_by(first.token) == ([], 0, [])
            assert close_lost(pool, rollout.rollout_id, second.token, lost) == [theirs.id]
