"""Retention: consumed groups go to an archive and then leave the pool, and the iterator reads them from there."""

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from zlib import crc32

import pytest
from pyarrow import parquet
from sqlalchemy import func, select, text

from proxy.commands.main import main
from proxy.pool.completions.records import NewCompletion, int_bytes
from proxy.pool.completions.routed_experts import RoutedExperts
from proxy.pool.completions.store import of_attempt
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.files import lock_directory
from proxy.pool.inspect.account import account
from proxy.pool.inspect.show import show
from proxy.pool.inspect.verify import verify
from proxy.pool.read import RolloutFilter, rollouts
from proxy.pool.read.archive_file import ArchiveFile
from proxy.pool.retention import archive as archiving
from proxy.pool.retention.archive import archive, drop
from proxy.pool.retention.horizon import horizon
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt, open_session
from proxy.pool.rollouts.groups import GroupOptions, OpenRollout, Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import find_run, open_run
from proxy.pool.rollouts.starts import Start
from proxy.pool.schema import archives, completions, groups
from proxy.pool.search import build
from proxy.pool.search.build import Builder
from proxy.pool.search.build import progress as progress_of
from proxy.pool.search.index import open_writer
from proxy.pool.search.query import Wanted, search
from proxy.pool.training.fates import RolloutFate
from proxy.pool.training.finished_rollouts import finished_rollout, finished_rollouts
from proxy.pool.training.steps import Published, latest, publish, reopen_after
from proxy.pool.training.windowed_fifo import LeaseRule, lease, of_step
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.pool.make import TASK, new_completion, record
from tests.pool.told import tell_at_once
from trainer.config.step import StepOptions
from trainer.data.assemble import assemble

Command = Callable[..., str]
STEPS = 4
EQUAL = UntrainedReason.EQUAL_REWARDS
"""Why no token of these steps is trained: their groups have one member."""


def turns(attempt_id: int) -> list[NewCompletion]:
    """Two turns on one path, and a broken one with a logprob that is no number."""
    first = new_completion(attempt_id)
    second = replace(
        new_completion(attempt_id, [5], [6]), prefix_length=4, path_crc=crc32(int_bytes([1, 2, 3, 4, 5, 6])),
        experts=RoutedExperts(4, 1, 1, 1, b"\7"),
    )  # fmt: skip
    broken = replace(
        first, logprobs=array("f", [float("nan"), -0.5]), untrainable=Untrained(UntrainedReason.ENGINE_FAILED, "gone")
    )
    return [first, second, broken]


@pytest.fixture
def trained(pool: Pool, tmp_path: Path) -> Pool:
    """Run r after four steps of one group each, of which the checkpoints of 2 and later exist; one group waits."""
    run = open_run(pool, "r", "train", {})
    version, fates = None, list[RolloutFate]()
    for step in range(STEPS + 1):
        if step:
            leased = lease(pool, run.id, step, LeaseRule(groups=1, window=4, max_staleness=9))
            assert leased is not None
            fates = [fate.to_pool() for fate in assemble(leased.groups, StepOptions(step=step)).fates]
        checkpoint = tmp_path / f"step-{step:06d}"
        if step >= 2:
            checkpoint.mkdir()
        done = Published(step=step, checkpoint=str(checkpoint), hf_dir="m", metrics={}, parent=version, fates=fates)
        version = publish(pool, run.id, done).id
        for member in open_group(pool, run.id, TASK, 1):
            for _ in range(2):  # the first attempt is retried
                attempt, _ = open_attempt(pool, member.rollout_id, "command")
                first, second, broken = turns(attempt.id)
                [start] = record(pool, [first])
                record(pool, [replace(second, prefix_of=start, follows=start), broken])
                close_attempt(pool, attempt.id, Ending())
            finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=0.5 + step))
    return pool


@pytest.fixture
def archived(trained: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """`proxy pool archive` of run r, and what it says."""

    def run(*more: str, older_than: int = 1, status: int = 0) -> str:
        to = ["--to", str(tmp_path / "old"), "--older-than", str(older_than)]
        assert main(["pool", "archive", trained.url, "r", *to, *more]) == status
        out = capsys.readouterr()
        return out.err if status else out.out

    return run


def read(pool: Pool) -> list[object]:
    """All that the iterator yields."""
    return [repr(one) for one in rollouts(pool, RolloutFilter(all_attempts=True))]


def calls(pool: Pool) -> int:
    with pool.read() as connection:
        return connection.scalar(select(func.count()).select_from(completions)) or 0


def test_archived_rollouts_are_read_as_before(trained: Pool, archived: Command, tmp_path: Path) -> None:
    before, stored, placed = read(trained), calls(trained), account(trained, 1)
    assert len(before) == 2 * (STEPS + 1) and "nan" in str(before)
    said = archived().splitlines()
    file = tmp_path / "old" / "r-1-steps-1-2.parquet"
    assert said == [
        f"archived 2 groups with 12 completions: {file}",
        "groups of the steps after 2 stay: the newest step is 4, and the oldest checkpoint, to which the run may be "
        "taken back, is of step 2",
    ]
    assert file.stat().st_mode & 0o777 == 0o600 and calls(trained) == stored and read(trained) == before
    assert archived("--drop").startswith("dropped the completions of 2 groups from the pool\n")
    assert calls(trained) == stored - 12 and read(trained) == before
    assert verify(trained).damages == []
    assert account(trained, 1) == placed and placed.unaccounted == 0
    rows = parquet.read_table(file, columns=["fate_version", "trained", "left_out"]).slice(3, 3).to_pylist()
    assert [(row["fate_version"], row["trained"]) for row in rows] == [(2, 0)] * 3
    assert {row["left_out"] for row in rows} == {'{"equal_rewards":2}', '{"equal_rewards":1}'}
    assert archived("--drop").startswith("dropped the completions of 0 groups")
    assert {path.name for path in (tmp_path / "old").iterdir()} == {file.name, "lock"}

    [final] = rollouts(trained, RolloutFilter(last_step=1))
    assert [item.tokens.tolist() for item in final.completions] == [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4]]
    assert [item.prefix_of is None for item in final.completions] == [True, False, True]
    assert show(trained, 1)[-1] == f"its calls have left the pool for {file}; read them with proxy.pool.read"


def test_its_progress_has_a_total(
    trained: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_at_once(monkeypatch)
    run = find_run(trained, "r")
    archive(trained, run, limits := horizon(trained, run, 1), tmp_path / "old")
    drop(trained, run, limits)
    lines = capsys.readouterr().err
    assert re.search(r"^writing r-1-steps-1-2.parquet: \d of 2 groups", lines, re.MULTILINE)
    assert re.search(r"^dropping what is archived: \d of 2 groups", lines, re.MULTILINE)


def test_what_a_rollback_reaches_stays(trained: Pool, archived: Command) -> None:
    """Also where fewer steps are asked to stay."""
    archived("--drop", older_than=0)
    run = open_run(trained, "r", "train", {})
    before = account(trained, run.id)
    with pytest.raises(UserError, match="steps up to 2 have left the pool for an archive, .* go back to step 2 or"):
        reopen_after(trained, run.id, 1)
    assert account(trained, run.id) == before and before.left_out[EQUAL].groups == STEPS
    reopen_after(trained, run.id, 2)
    back = account(trained, run.id)
    assert (back.left_out[EQUAL].groups, back.waiting["reopened"].groups, back.unaccounted) == (2, 2, 0)
    assert back.sampled == before.sampled and back.left_out[EQUAL].tokens * 2 == before.left_out[EQUAL].tokens
    for step in (3, 4):
        again = lease(trained, run.id, step, LeaseRule(groups=1, window=4, max_staleness=9))
        assert again is not None and len(again.groups[0].rollouts[0].completions) == 3
    with trained.read() as connection:
        query = select(groups.c.step, groups.c.state, groups.c.archive_id, groups.c.dropped_at.is_not(None))
        rows = [tuple(row) for row in connection.execute(query.order_by(groups.c.id))]
    gone, stays = ("CONSUMED", 1, True), (None, False)
    assert rows == [(1, *gone), (2, *gone), (3, "LEASED", *stays), (4, "LEASED", *stays), (None, "DONE", *stays)]
    assert "the newest step is 2" in archived()
    for step in (3, 4):  # trained again
        newest, leased = latest(trained, 1), lease(trained, 1, step, LeaseRule(groups=1, window=4, max_staleness=9))
        assert leased is not None and newest is not None
        fates = [fate.to_pool() for fate in assemble(leased.groups, StepOptions(step=step)).fates]
        done = Published(step=step, checkpoint="c", hf_dir="m", metrics={}, parent=newest.id, fates=fates)
        publish(trained, run.id, done)
    assert account(trained, run.id) == before


def begun(pool: Pool, attempt_id: int) -> OpenRollout:
    """The one rollout of a group of another run that begins with a recorded attempt."""
    options = GroupOptions(start=Start(attempt_id, 1, 0.0))
    [member] = open_group(pool, open_run(pool, "new", "train", {}).id, TASK, 1, options)
    return member


def test_an_attempt_that_an_open_group_begins_with_stays(trained: Pool, archived: Command) -> None:
    member, stored = begun(trained, 2), calls(trained)
    assert archived("--drop").startswith("archived 1 groups with 6 completions")
    assert calls(trained) == stored - 6 and len(of_attempt(trained, 2)) == 3
    finish_rollout(trained, member.rollout_id, Outcome(attempt_id=None, reward=None, failure="verifier"))
    assert archived("--drop").startswith("archived 1 groups with 6 completions")
    assert calls(trained) == stored - 12 and of_attempt(trained, 2) == []


def test_a_group_that_begins_while_others_are_dropped_keeps_its_attempt(
    trained: Pool, archived: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    archived()
    members, verified = list[OpenRollout](), archiving._verified

    def meanwhile(pool: Pool, group_id: int, file: ArchiveFile) -> list[int]:
        members.append(begun(pool, 4))
        return verified(pool, group_id, file)

    monkeypatch.setattr(archiving, "_verified", meanwhile)
    assert archived("--drop").startswith("dropped the completions of 1 groups")
    assert of_attempt(trained, 2) == [] and len(of_attempt(trained, 4)) == 3 and len(members) == 2


@pytest.fixture
def all_trained(trained: Pool, tmp_path: Path) -> Pool:
    """The same run after a step that took the group that waits; only its checkpoint exists."""
    newest, leased = latest(trained, 1), lease(trained, 1, STEPS + 1, LeaseRule(groups=1, window=4, max_staleness=9))
    assert newest is not None and leased is not None
    for directory in tmp_path.glob("step-*"):
        directory.rmdir()
    (tmp_path / "newest").mkdir()
    done = Published(step=STEPS + 1, checkpoint=str(tmp_path / "newest"), hf_dir="m", metrics={}, parent=newest.id)
    publish(trained, 1, done)
    return trained


def indexed(pool: Pool, index: sqlite3.Connection) -> int:
    """Bring an index up to date with its pool; how many calls it has had."""
    builder = Builder(pool, index)
    while builder.step():
        pass
    assert progress_of(index).whole
    return progress_of(index).calls


def test_no_call_gets_the_number_of_one_that_was_dropped(
    all_trained: Pool, archived: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "SETTLE_SECONDS", -5.0)
    before, stored = read(all_trained), calls(all_trained)
    with closing(open_writer(tmp_path / "index")) as index:
        assert indexed(all_trained, index) == stored
        said = archived("--drop", older_than=0)
        assert read(all_trained) == before
        attempt = open_session(all_trained, "k")
        assert record(all_trained, [new_completion(attempt.id)]) == [stored + 1]
        assert indexed(all_trained, index) == stored + 1
        assert [hit.call for hit in search(index, Wanted(words="ok")).hits][0] == stored + 1
    assert f"dropped the completions of {STEPS} groups from the pool\n" in said
    assert archived("--drop", older_than=0).startswith("dropped the completions of 1 groups from the pool\n")
    assert calls(all_trained) == 1


def test_more_steps_stay_where_more_are_asked_for(trained: Pool, archived: Command) -> None:
    assert "steps-1-1.parquet" in archived(older_than=3) and "steps-2-2.parquet" in archived("--drop", older_than=2)
    assert archived(older_than=9).startswith("groups of the steps after -5 stay")
    assert len(read(trained)) == 2 * (STEPS + 1)


def test_others_say_that_the_calls_are_gone(trained: Pool, archived: Command, tmp_path: Path) -> None:
    run = open_run(trained, "r", "train", {})
    assert len(finished_rollouts(trained, run.id)) == STEPS + 1
    archived("--drop")
    assert [len(one.completions) for one in finished_rollouts(trained, run.id)] == [3] * (STEPS - 1)
    with pytest.raises(UserError, match="the rollouts of step 1 have left the pool"):
        of_step(trained, run.id, 1)
    with pytest.raises(UserError, match="the calls of rollout 1 have left the pool"):
        finished_rollout(trained, run.id, 1)
    moved = tmp_path / "moved"
    (tmp_path / "old").rename(moved)
    with pytest.raises(UserError, match=r"steps-1-2.parquet cannot be read .*; put it back, or name the directory"):
        read(trained)
    assert len(list(rollouts(trained, RolloutFilter(archives=moved)))) == STEPS + 1
    file = moved / "r-1-steps-1-2.parquet"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(UserError, match="steps-1-2.parquet cannot be read"):
        list(rollouts(trained, RolloutFilter(archives=moved)))


def test_nothing_is_dropped_that_the_archive_does_not_hold(trained: Pool, archived: Command, tmp_path: Path) -> None:
    archived()
    stored = calls(trained)
    with trained.write() as connection:
        connection.execute(completions.update().where(completions.c.id == 2).values(misfit="changed"))
    assert "the archive does not hold attempt 1 as the pool does" in archived("--drop", status=2)
    (tmp_path / "old" / "r-1-steps-1-2.parquet").unlink()
    assert "cannot be read" in archived("--drop", status=2)
    assert calls(trained) == stored


def test_one_command_at_a_time_writes_to_a_directory(trained: Pool, archived: Command, tmp_path: Path) -> None:
    lock = lock_directory(tmp_path / "old")
    assert "is in use by process" in archived(status=2)
    os.close(lock)
    (tmp_path / "file").touch()
    nowhere = ["--to", str(tmp_path / "file")]
    assert "cannot be written (" in archived(*nowhere, status=2)
    assert archived().startswith("archived 2 groups")


@pytest.mark.parametrize(
    ("run", "older_than", "sentence"),
    [
        ("s", 1, "run 's' is not in the pool"),
        ("new", 1, "run 'new' has no train steps, so none of its groups is consumed"),
        ("r", -1, "--older-than is a number of steps, 0 or more: -1"),
        ("r", 1, "is not here"),
    ],
)
def test_what_cannot_be_archived_is_one_sentence(
    trained: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str, older_than: int, sentence: str
) -> None:
    open_run(trained, "new", "collect", {})
    (tmp_path / f"step-{STEPS:06d}").rename(tmp_path / "elsewhere")
    words = ["archive", trained.url, run, "--older-than", str(older_than), "--to", str(tmp_path / "old")]
    assert main(["pool", *words]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.startswith("error: ") and error.count("\n") == 1


def started(pool: Pool, directory: Path) -> "subprocess.Popen[bytes]":
    words = ["pool", "archive", pool.url, "r", "--older-than", "1", "--to", str(directory), "--drop"]
    return subprocess.Popen([sys.executable, "-m", "proxy", *words], stdout=subprocess.DEVNULL)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def dropped(pool: Pool) -> int:
    with pool.read() as connection:
        return connection.scalar(select(func.count(groups.c.dropped_at))) or 0


def test_a_kill_between_the_file_and_the_pool_loses_nothing(trained: Pool, archived: Command, tmp_path: Path) -> None:
    before = read(trained)
    with trained.write() as connection:  # SQLite: the only writer
        if trained.dialect == "postgresql":
            connection.execute(text("lock table groups in share mode"))
        command = started(trained, tmp_path / "old")
        wait_for(lambda: (tmp_path / "old" / "r-1-steps-1-2.parquet").exists())
        os.kill(command.pid, signal.SIGKILL)
        command.wait()
    with trained.read() as connection:
        assert connection.scalar(select(func.count()).select_from(archives)) == 0
    assert read(trained) == before and dropped(trained) == 0
    assert archived("--drop").splitlines()[1] == "dropped the completions of 2 groups from the pool"
    assert {path.name for path in (tmp_path / "old").iterdir()} == {"r-1-steps-1-2.parquet", "lock"}
    assert read(trained) == before and verify(trained).damages == []


@contextmanager
def stuck_at_the_second_group(pool: Pool) -> Iterator[None]:
    """While this lasts, nobody can delete the completions of the second group: a lock, or a trigger without end."""
    if pool.dialect == "postgresql":
        with pool.write() as connection:
            connection.execute(text("select id from completions where attempt_id = 3 for update"))
            yield
        return
    endless = "with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n"
    with pool.write() as connection:
        connection.execute(
            text(f"create trigger stuck before delete on completions when old.attempt_id = 3 begin {endless}; end")
        )
    yield
    with pool.write() as connection:
        connection.execute(text("drop trigger stuck"))


@pytest.mark.long
def test_a_kill_between_two_groups_loses_nothing(trained: Pool, archived: Command, tmp_path: Path) -> None:
    before = read(trained)
    with stuck_at_the_second_group(trained):
        command = started(trained, tmp_path / "old")
        wait_for(lambda: dropped(trained) == 1)
        assert read(trained) == before
        os.kill(command.pid, signal.SIGKILL)
        command.wait()
    assert read(trained) == before and dropped(trained) == 1 and verify(trained).damages == []
    assert archived("--drop").splitlines()[0] == "dropped the completions of 1 groups from the pool"
    assert read(trained) == before and verify(trained).damages == []
