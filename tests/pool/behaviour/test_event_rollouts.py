"""From an event to the rollouts that show it: by the function that reads them, and in `harness behaviour`."""

from dataclasses import replace

import pytest
from sqlalchemy import update

from harness.cli import main
from proxy.commands.main import main as proxy
from proxy.pool.behaviour.event import Kind
from proxy.pool.database import Pool
from proxy.pool.inspect.event_rollouts import EventRollout, event_rollouts
from proxy.pool.rollouts.runs import Run, open_run
from proxy.pool.schema import groups
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.pool.behaviour.test_statistics import completions_of, finish
from tests.pool.behaviour.work import Failed, Work


def looped(times: int) -> Work:
    """A look around, then a call that fails so many times in a row, and the end: the third failure is a loop."""
    return Work().shell("ls").shell(*["make"] * times, answer=Failed("make: not found")).done()


@pytest.fixture
def run(pool: Pool) -> Run:
    """A run with a loop in its first rollout, none in its second one, and two in its third one, which failed."""
    run = open_run(pool, "r", "collect", {})
    finish(pool, run.id, completions_of(looped(3)), 0.25, id="first")
    finish(pool, run.id, completions_of(looped(2)), id="none")
    finish(pool, run.id, completions_of(looped(4)), None, "verifier", id="third\x1b[31m")
    with pool.write() as connection:
        connection.execute(update(groups).where(groups.c.id == 1).values(step=7, state="CONSUMED"))
    return run


def shown(pool: Pool, capsys: pytest.CaptureFixture[str], event: str, status: int = 0) -> str:
    assert main(["behaviour", "--pool", pool.url, "--name", "r", "--event", event]) == status
    out = capsys.readouterr()
    return out.err if status else out.out


def test_the_rollouts_of_an_event_are_found_newest_first_with_its_first_place(pool: Pool, run: Run) -> None:
    found = event_rollouts(pool, run.id, Kind.RETRY_LOOP)
    assert found.rollouts == [
        EventRollout(3, 3, "third\x1b[31m", "command", None, None, "verifier", 2, completion=13, turn=4),
        EventRollout(1, 1, "first", "command", 7, 0.25, None, 1, completion=4, turn=4),
    ]
    assert (found.total, found.looked_at) == (2, 3)
    newest = event_rollouts(pool, run.id, Kind.RETRY_LOOP, most=1)
    assert newest.rollouts == found.rollouts[:1] and newest.total == 2
    assert event_rollouts(pool, run.id + 1, Kind.RETRY_LOOP).looked_at == 0


def test_what_a_rollout_replays_of_a_recorded_one_is_not_its_own(pool: Pool, run: Run) -> None:
    items = completions_of(looped(5))
    replayed = [replace(item, untrainable=Untrained(UntrainedReason.REPLAYED)) for item in items[:4]]
    rollout = finish(pool, run.id, [*replayed, *items[4:]])
    assert rollout not in [each.rollout for each in event_rollouts(pool, run.id, Kind.RETRY_LOOP).rollouts]


def test_the_command_lists_them_and_says_how_to_look_at_one(
    pool: Pool, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = shown(pool, capsys, "retry_loop").splitlines()
    cells = [line.split() for line in lines if line.strip()]
    assert cells[0] == "rollout attempt task agent step reward events first turn".split()
    assert cells[2] == "3 3 third [31m command - verifier 2 #13 4".split()
    assert cells[3] == "1 1 first command 7 0.250 1 #4 4".split()
    assert lines[-2] == "retry_loop is in 2 of 3 finished rollouts of r in the pool"
    said, _, command = lines[-1].partition(": ")
    assert said == "look at one by its attempt" and command.startswith("proxy pool show ") and len(cells) == 6
    assert proxy(["pool", "show", pool.url, command.split()[-1]]) == 0
    assert "#13 follows #12" in capsys.readouterr().out


def test_of_many_rollouts_the_newest_are_listed_and_the_rest_counted(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    run = open_run(pool, "r", "collect", {})
    for _ in range(52):
        finish(pool, run.id, completions_of(Work().done("")))
    out = shown(pool, capsys, "empty_turn")
    listed = [int(line.split()[0]) for line in out.splitlines() if line.split()[:1] and line.split()[0].isdecimal()]
    assert listed == list(range(52, 2, -1))
    assert "\nempty_turn is in 52 of 52 finished rollouts of r in the pool; these are the newest 50\n" in out


def test_what_is_not_there_is_one_sentence(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    run = open_run(pool, "r", "collect", {})
    assert "no rollout of r has finished yet" in shown(pool, capsys, "retry_loop", status=2)
    finish(pool, run.id, completions_of(looped(1)))
    assert shown(pool, capsys, "retry_loop") == "retry_loop is in none of 1 finished rollouts of r in the pool\n"
    error = shown(pool, capsys, "retry_lop", status=2)
    assert error.startswith("error: 'retry_lop' is no event; name one of these: tool_called, ")
    assert "runner_left (the nearest: retry_loop)" in error and error.count("\n") == 1
    assert "nearest" not in shown(pool, capsys, "x", status=2)
    with pytest.raises(SystemExit):
        main(["behaviour", "--pool", pool.url, "--name", "r", "--event", "retry_loop", "--by", "agent"])
    assert "not allowed with" in capsys.readouterr().err
