"""A user's function between pool and batch: its answers are stored with the lease, and it cannot stop a run."""

from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.export.sequences import origin, sequences
from proxy.pool.functions import process
from proxy.pool.functions.process import FunctionProcess
from proxy.pool.functions.weights import weigh
from proxy.pool.read import rollouts
from proxy.pool.rollouts.runs import open_run
from proxy.pool.training.steps import Published
from proxy.pool.training.windowed_fifo import Lease, LeaseRule, lease
from proxy.pool.untrained import UntrainedReason
from tests.pool.make import finished_group, publish_next

NAME = "filters:judge"
FAULTS = """
import os, sys, time
print("a word on standard output")
def judge(rollout):
    assert rollout["group_rewards"] == [0.0, 1.0] * 4 and rollout["completions"][0]["sampled"] == [3, 4]
    member = rollout["member"]
    if member == 2: raise KeyError("x")
    if member == 3: time.sleep(600)
    if member == 4: return "1"
    if member == 5: os._exit(3)
    if member == 6: bytearray(1 << 34)
    return [2.5, False, 0, 0, 0, 0, 0, 1][member]
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write the module of the function."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write_module(text: str) -> None:
        (tmp_path / "filters.py").write_text(text)

    return write_module


def leased(pool: Pool, run_id: int) -> Lease:
    taken = lease(pool, run_id, 1, LeaseRule(groups=1, window=1, max_staleness=5))
    assert taken is not None
    return taken


def begun(pool: Pool) -> int:
    run = open_run(pool, "r", "train", {})
    publish_next(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    finished_group(pool, run.id, [0.0, 1.0] * 4)
    return run.id


def test_a_rollout_has_its_weight_or_is_set_aside_and_a_second_lease_is_the_same(
    pool: Pool, write: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run_id = begun(pool)
    write(FAULTS)
    monkeypatch.setattr(process, "CALL_SECONDS", 5.0)
    assert weigh(pool, run_id, leased(pool, run_id), NAME)
    [group] = leased(pool, run_id).groups
    assert [(member.weight, member.untrained and member.untrained.detail) for member in group.rollouts] == [
        (2.5, None),
        (0.0, "filters:judge"),
        (1.0, "filters:judge raised KeyError"),
        (1.0, "filters:judge took longer than 5 s"),
        (1.0, "filters:judge returned a str, not a number"),
        (1.0, "filters:judge ended its process with status 3"),
        (1.0, "filters:judge raised MemoryError"),
        (1.0, None),
    ]
    assert {member.untrained.reason for member in group.rollouts if member.untrained} == {UntrainedReason.FUNCTION}
    assert "warning: filters:judge raised KeyError ('x') for rollout 3, which is set aside" in capfd.readouterr().err
    with FunctionProcess("examples.batch_function:unhurried") as example:
        endings = [["stop"], ["stop", "stop"], ["stop", "length"]]
        asked = [{"completions": [{"id": 1, "finish_reason": reason} for reason in reasons]} for reasons in endings]
        assert [example.weigh(fields).weight for fields in asked] == [0.5, 1.0, 0.0]
    read = list(rollouts(pool))
    assert [rollout.weight for rollout in read] == [2.5, 0.0, *[None] * 5, 1.0]
    whys = [rollout.completions[0].untrained for rollout in read]
    assert [why and str(why) for why in whys[:3]] == [
        None,
        f"function: {NAME}",
        f"function: {NAME} raised KeyError",
    ]
    assert sequences(read[0]) and not sequences(read[1]) and origin(read[0])["weight"] == 2.5
    write("def judge(rollout): return 9")
    assert not weigh(pool, run_id, leased(pool, run_id), NAME) and leased(pool, run_id).groups == [group]


def test_completions_that_the_function_leaves_out_are_context_and_are_said_to_be(
    pool: Pool, write: Callable[[str], None]
) -> None:
    run_id = begun(pool)
    write("""
def judge(rollout):
    ids = [item["id"] for item in rollout["completions"]]
    return [
        {"leave_out": ids, "weight": 2}, {"leave_out": []}, {"weight": 0, "leave_out": ids}, {"leave_out": [10**6]},
        {"leave_out": 3}, {"leave_out": ["1"]}, {}, {"leave": ids},
    ][rollout["member"]]
""")
    staleness = leased(pool, run_id).groups[0].staleness
    assert weigh(pool, run_id, leased(pool, run_id), NAME)
    [group] = leased(pool, run_id).groups
    assert [(member.weight, member.untrained and member.untrained.detail) for member in group.rollouts] == [
        (2.0, None),
        (1.0, None),
        (0.0, NAME),
        (1.0, f"{NAME} leaves out completions that are not the rollout's"),
        (1.0, f"{NAME} returned a leave_out that is no list of ids"),
        (1.0, f"{NAME} returned a leave_out that is no list of ids"),
        (1.0, f"{NAME} returned [] and not 'weight' or 'leave_out'"),
        (1.0, f"{NAME} returned ['leave'] and not 'weight' or 'leave_out'"),
    ]
    whys = [member.completions[0].untrainable for member in group.rollouts]
    assert [why and str(why) for why in whys] == [f"function: {NAME}", None, f"function: {NAME}", *[None] * 5]
    assert group.staleness == staleness == group.rollouts[0].staleness
    read = list(rollouts(pool))
    assert [str(item.completions[0].untrained) for item in read[:2]] == [f"function: {NAME}", "None"]
    assert read[0].completions[0].untrainable is None  # as it was recorded
    write("def judge(rollout): return 9")
    assert not weigh(pool, run_id, leased(pool, run_id), NAME) and leased(pool, run_id).groups == [group]


def test_a_function_that_is_of_no_use_is_one_sentence_and_stores_nothing(
    tmp_path: Path, write: Callable[[str], None]
) -> None:
    for name, why in (
        ("nowhere:judge", "No module named 'nowhere'"),
        ("filters:judge", "has no attribute 'judge'"),
        ("filters:NUMBER", "it is of type int, which cannot be called"),
        ("filters_end:judge", "its import ended the process"),
    ):
        write("NUMBER = 3")
        (tmp_path / "filters_end.py").write_text("import os; os._exit(1)")
        with pytest.raises(UserError, match=f"batch.function = {name} cannot be used .*{why}"), FunctionProcess(name):
            pass
    pool = open_pool(str(tmp_path / "pool.db"))
    run_id = begun(pool)
    write("def judge(rollout): return rollout['prize']")
    before = leased(pool, run_id)
    with pytest.raises(UserError, match=r"raised KeyError \('prize'\) for every rollout; correct it and start again"):
        weigh(pool, run_id, before, NAME)
    assert leased(pool, run_id) == before
    write("def judge(rollout): return 2")
    assert weigh(pool, run_id, before, NAME)
    assert {member.weight for member in leased(pool, run_id).groups[0].rollouts} == {2.0}
    pool.close()
