"""Imported demonstrations as rows: groups by task, rollouts by session, prompts stored once; on each database."""

import json
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.verify import verify
from proxy.pool.read import RolloutFilter, rollouts
from proxy.pool.traces.atif_reading import ReadTrajectory
from proxy.pool.traces.demonstrations import Demonstration, import_atif
from proxy.pool.training.finished_rollouts import finished_rollouts, tokenizers


def numbered(trajectory: ReadTrajectory) -> Iterator[Demonstration]:
    """Two answers; the second prompt begins with the path of the first one."""
    for prompt, answer in (([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])):
        yield Demonstration(
            prompt=array("i", prompt),
            answer=array("i", answer),
            logprobs=array("f"),
            reply=trajectory.turns[-1].message,
            label=None,
            finish_reason="stop",
            made_of="rendered",
        )


def write(file: Path, sessions: list[str], task: str) -> Path:
    steps = [{"step_id": 1, "source": "agent", "message": "said"}]
    lines = [
        {
            "schema_version": "ATIF-v1.8",
            "session_id": session,
            "agent": {"name": "other", "version": "1"},
            "steps": steps,
            "extra": {"blackforge": {"task": task, "reward": 0.5}},
        }
        for session in sessions
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_sessions_are_rollouts_and_tasks_are_groups(pool: Pool, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", ["one", "two", "one"], "t")
    other = write(tmp_path / "b.jsonl", ["three"], "u")
    (tmp_path / "notes.txt").touch()
    counts = import_atif(pool, "d", [tmp_path], numbered, "fingerprint")
    assert (counts.documents, counts.groups, counts.rollouts, counts.by_origin) == (4, 2, 3, {"rendered": 8})
    one, two, three = found = list(rollouts(pool, RolloutFilter(run="d")))
    assert [(each.task, each.agent, each.reward) for each in found] == [
        ("t", "other", 0.5), ("t", "other", 0.5), ("u", "other", 0.5),
    ]  # fmt: skip
    assert [len(each.completions) for each in found] == [4, 2, 2]
    first, second = two.completions
    assert second.tokens.tolist() == [1, 2, 3, 4, 5, 6] and (second.prefix_of, second.prefix_length) == (first.id, 4)
    assert verify(pool).damages == [] and len(finished_rollouts(pool, 1)) == 3
    assert tokenizers(pool, [three.attempt or 0]) == {"fingerprint"}
    with pytest.raises(UserError, match="has a run 'd' already; choose another name"):
        import_atif(pool, "d", [other], numbered, None)
