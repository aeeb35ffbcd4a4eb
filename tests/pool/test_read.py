"""Rollouts as data: filters, pages, records, Arrow, Hugging Face, and the lines that docs/pool.md shows."""

import json
import os
import re
import subprocess
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from zlib import crc32

import pytest
from sqlalchemy.dialects import sqlite

from proxy.pool.completions.records import VersionSpan, int_bytes
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.read import RolloutFilter, record_batches, rollouts
from proxy.pool.read.pages import PAGE, count
from proxy.pool.read.shown import shown
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.schema import groups
from proxy.pool.training.steps import Published, publish
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from proxy.pool.untrained import Untrained, UntrainedReason
from tests.conftest import need
from tests.pool.make import TASK, finished_group, new_completion, record
from tests.pool.told import tell_at_once
from tests.proxy.sdks import environments

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Recorded:
    pool: Pool
    first_attempt: int
    final_attempt: int
    ids: list[int]


@pytest.fixture
def recorded(pool: Pool) -> Recorded:
    """Run r: a rollout that was tried twice, then groups of two, of which step 1 took the first."""
    run = open_run(pool, "r", "train", {})
    publish(pool, run.id, Published(step=0, checkpoint="c", hf_dir="m", metrics={}))
    [rollout] = open_group(pool, run.id, TASK | {"id": "math", "domain": "math"}, 1)
    first, _ = open_attempt(pool, rollout.rollout_id, "command")
    record(pool, [new_completion(first.id)])
    close_attempt(pool, first.id, Ending())
    final, _ = open_attempt(pool, rollout.rollout_id, "command")
    # The path 1 2 | 3 4, then 1 2 3 4 5 | 6 7 8, of which the proxy gave 6.
    [start] = record(pool, [new_completion(final.id)])
    more = replace(
        new_completion(final.id, [5], [6, 7, 8]), prefix_of=start, prefix_length=4, follows=start, given=((0, 1),),
        logprobs=array("f", [-0.25, -1.5]), versions=(VersionSpan("v1", 1, 3),),
        path_crc=crc32(int_bytes(range(1, 9))),
    )  # fmt: skip
    lost = replace(new_completion(final.id), untrainable=Untrained(UntrainedReason.ABANDONED), logprobs=array("f"))
    ids = [start, *record(pool, [more, lost])]
    close_attempt(pool, final.id, Ending())
    finish_rollout(pool, rollout.rollout_id, Outcome(attempt_id=final.id, reward=0.5, reward_parts={"verifier": 0.5}))
    finished_group(pool, run.id, [1.0, None, 0.0])
    finished_group(pool, run.id, [None, None, 1.0])
    assert lease(pool, run.id, 1, LeaseRule(groups=2, window=4, max_staleness=9))
    return Recorded(pool, first.id, final.id, ids)


def test_a_rollout_is_read_with_its_tokens_masks_and_outcome(recorded: Recorded) -> None:
    rollout, *_ = rollouts(recorded.pool, RolloutFilter(run="r"))
    assert (rollout.run, rollout.task, rollout.domain, rollout.group, rollout.member) == ("r", "math", "math", 0, 0)
    assert (rollout.group_state, rollout.step, rollout.final, rollout.agent) == ("LEASED", 1, True, "command")
    assert (rollout.attempt, rollout.reward, rollout.reward_parts) == (recorded.final_attempt, 0.5, {"verifier": 0.5})
    start, more, lost = rollout.completions
    assert [item.id for item in rollout.completions] == recorded.ids
    assert (more.tokens.tolist(), more.prompt_length) == ([1, 2, 3, 4, 5, 6, 7, 8], 5)
    assert (more.prefix_of, more.prefix_length, more.follows, start.prefix_of) == (start.id, 4, start.id, None)
    assert more.mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1] and start.mask.tolist() == [0, 0, 1, 1]
    assert more.given_mask.tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert more.prompt_mask.tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert more.logprobs.tolist() == [-0.25, -1.5] and more.versions == (VersionSpan("v1", 1, 3),)
    assert lost.mask.tolist() == [0] * 4 and len(lost.logprobs) == 0
    assert [str(item.untrained) for item in rollout.completions] == ["None", "None", "abandoned"]


def test_filters_choose_what_is_read(recorded: Recorded) -> None:
    def members(**chosen: object) -> list[tuple[int, int]]:
        return [(one.group, one.member) for one in rollouts(recorded.pool, RolloutFilter(**chosen))]  # type: ignore[arg-type]

    everything = [(0, 0), *((1, member) for member in range(3)), *((2, member) for member in range(3))]
    assert members() == members(run="r") == everything
    assert members(state="TOMBSTONE") == everything[4:] and members(state="DONE") == []
    assert members(domain="math") == [(0, 0)]
    assert members(first_step=1) == members(last_step=1) == everything[:4] and members(first_step=2) == []
    assert members(min_reward=0.5) == [(0, 0), (1, 0), (2, 2)]
    assert members(min_reward=0, max_reward=0.5) == [(0, 0), (1, 2)]
    assert members(labels=["main"]) == [] and members(labels=()) == []  # these rows have no label
    attempts = [
        (one.attempt, one.final, one.reward) for one in rollouts(recorded.pool, RolloutFilter(all_attempts=True))
    ]
    assert attempts[:2] == [(recorded.first_attempt, False, None), (recorded.final_attempt, True, 0.5)]
    [retried, *_] = rollouts(recorded.pool, RolloutFilter(all_attempts=True))
    assert str(retried.completions[0].untrained) == "retried"
    reasons = [str(item.untrained) for one in rollouts(recorded.pool) for item in one.completions if one.group]
    lost = ["rollout_failed: verifier"] * 2 + ["too_few_valid: 1 of 3 rollouts have a reward"]
    assert reasons == ["None", "rollout_failed: verifier", "None", *lost]
    for wrong, sentence in (("BANANA", "'BANANA' is unknown; choose one of: RUNNING"), ("s", "run 's' is not in")):
        with pytest.raises(UserError, match=sentence):
            list(rollouts(recorded.pool, RolloutFilter(**{"run" if wrong == "s" else "state": wrong})))  # type: ignore[arg-type]


def test_a_reader_sees_how_many_rollouts_are_left(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for which in (RolloutFilter(), RolloutFilter(run="r", all_attempts=True), RolloutFilter(first_step=1, last_step=1)):
        assert count(recorded.pool, which) == len(list(rollouts(recorded.pool, which)))
    tell_at_once(monkeypatch)
    with shown(recorded.pool, RolloutFilter(run="r"), "exporting") as found:
        assert len(list(found)) == 7
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("exporting: ") and all(" of 7 rollouts" in line for line in lines)


def test_a_long_run_is_read_in_pages_of_one_index(pool: Pool) -> None:
    run = open_run(pool, "r", "train", {})
    count = 2 * PAGE + 1
    for _ in range(count):
        open_group(pool, run.id, TASK, 1)
    open_group(pool, open_run(pool, "s", "train", {}).id, TASK, 1)
    read = list(rollouts(pool, RolloutFilter(all_attempts=True)))
    assert [(one.run, one.group) for one in read] == [*(("r", index) for index in range(count)), ("s", 0)]
    assert all(one.attempt is None and one.completions == () and not one.final for one in read)
    assert list(rollouts(pool)) == []
    if pool.dialect == "sqlite":
        query = RolloutFilter(state="DONE", domain="d", first_step=1, last_step=2).groups_query(run.id)
        page = query.where(groups.c.queue_index > 5).limit(PAGE).compile(dialect=sqlite.dialect())
        with pool.read() as connection:
            steps = connection.exec_driver_sql(f"explain query plan {page}", tuple(page.params.values())).all()
        plan = [step.detail for step in steps]
        assert plan[0].endswith("(run_id=? AND queue_index>?)") and not any("TEMP B-TREE" in line for line in plan)


def test_arrow_batches_hold_the_same_numbers(recorded: Recorded) -> None:
    need("pyarrow", find_spec("pyarrow") is not None)
    [batch] = record_batches(recorded.pool, RolloutFilter(run="r", domain="math"))
    rows = batch.to_pylist()
    assert [row["completion"] for row in rows] == recorded.ids
    assert rows[1]["tokens"] == [1, 2, 3, 4, 5, 6, 7, 8] and rows[1]["mask"] == [0, 0, 0, 0, 0, 0, 1, 1]
    assert rows[1]["given"] == [[5, 6]] and rows[1]["logprobs"] == [-0.25, -1.5]
    assert rows[1]["versions"] == [{"version": "v1", "start": 1, "end": 3}]
    assert (rows[1]["prefix_of"], rows[1]["prefix_length"]) == (recorded.ids[0], 4)
    assert rows[2]["untrained"] == rows[2]["untrainable"] == "abandoned" and rows[2]["logprobs"] == []
    assert json.loads(rows[0]["reward_parts"]) == {"verifier": 0.5} and rows[0]["reward"] == 0.5


def lines_of_the_page(number: int) -> str:
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "pool.md").read_text(), re.M | re.S)
    return str(blocks[number])


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Path]:
    """A directory with the pool that the page names: a run with a rollout that was rewarded and one that was not."""
    pool = open_pool(str(tmp_path / "runs" / "pool.db"))
    run = open_run(pool, "train", "train", {})
    finished_group(pool, run.id, [1.0, 0.0])
    pool.close()
    yield tmp_path


def ran(lines: str, directory: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", lines], cwd=directory, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_three_lines_of_the_page_read_a_pool(reader: Path) -> None:
    lines = lines_of_the_page(0)
    assert len([line for line in lines.splitlines() if line]) == 3
    assert ran(lines, reader) == "t 1.0 [4]\n"


@pytest.mark.long
def test_the_datasets_library_reads_a_pool(reader: Path) -> None:
    lines = lines_of_the_page(1) + "print(dataset('runs/pool.db', 'again.arrow')[1]['tokens'])\n"
    first, *said = ran(
        lines, reader, PYTHONPATH=str(environments.packages_beside_ours("datasets")), HF_HUB_OFFLINE="1"
    ).splitlines()
    assert first.startswith("2 ['run', 'task'") and said[-1] == "[1, 2, 3, 4]"
    assert any("num_rows: 2" in line for line in said)
