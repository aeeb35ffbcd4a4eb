"""Where groups begin: both ways of choosing how many turns of a recorded success are replayed, by hand-made numbers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from harness.anchors import Anchors, first_unfinished, rollback
from harness.settings import load_settings
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.groups import GroupOptions, open_group
from proxy.pool.rollouts.queue import PlannedGroup
from proxy.pool.rollouts.runs import open_run
from proxy.pool.rollouts.starts import RecordedSuccess, Start
from tests.pool.conftest import pool  # noqa: F401
from tests.pool.make import TASK
from tests.pool.test_starts import recorded_run, rolled


def of_eight(solved: int) -> list[bool]:
    return [True] * solved + [False] * (8 - solved)


@pytest.mark.parametrize(
    ("seen", "anchor"),
    [
        ({}, 4),  # the last of five chunks first
        ({4: of_eight(8)[:7]}, 4),  # seven samples are not enough
        ({4: of_eight(8)}, 3),
        ({4: of_eight(6)}, 3),  # 1 to 0.75: not significantly lower
        ({4: of_eight(5)}, 4),  # 1 to 0.625: the fifth chunk is the crucial one
        ({4: of_eight(7), 3: of_eight(6), 2: of_eight(2)}, 2),  # 0.75 to 0.25: the third one is
        ({4: of_eight(7), 3: of_eight(6), 2: of_eight(2) + of_eight(4)}, 1),  # it was learned: the newest eight count
        ({4: of_eight(6), 3: of_eight(4), 2: of_eight(2), 1: of_eight(0)}, 0),  # a quarter each: no chunk is crucial
        ({4: of_eight(6), 3: of_eight(4), 2: of_eight(2), 1: of_eight(0), 0: of_eight(0)}, None),
        (dict.fromkeys(range(5), of_eight(8)), None),
    ],
)
def test_the_rollback_stops_where_success_drops(seen: dict[int, list[bool]], anchor: int | None) -> None:
    assert rollback(5, seen) == anchor


def test_the_next_recorded_success_follows_when_one_is_rolled_back() -> None:
    found = [RecordedSuccess(7, 2, 1.0), RecordedSuccess(9, 3, 2.0)]
    assert first_unfinished(found, {7: {1: of_eight(8)}}) == Start(7, 0, 1.0)
    over: dict[int, dict[int, Sequence[bool]]] = {7: {1: of_eight(8), 0: of_eight(8)}}
    assert first_unfinished(found, over) == Start(9, 2, 2.0)
    assert first_unfinished(found[:1], over) is None


def planned(**options: object) -> PlannedGroup:
    return PlannedGroup(TASK, 8, GroupOptions(agent="command", **options))  # type: ignore[arg-type]  # its fields


def test_a_rollback_follows_from_the_pool(pool: Pool) -> None:  # noqa: F811
    (source,) = recorded_run(pool)
    run_id, anchors = open_run(pool, "new", "collect", {}).id, Anchors(run="old", way="rollback", seed=0)
    seen = []
    for solved in (8, 8, 2, 8, 8):
        options = anchors.begin(pool, run_id, planned())
        seen.append(options.start.turns if options.start else None)
        assert options.start is None or options.start.attempt_id == source
        for number, rollout in enumerate(open_group(pool, run_id, TASK, 8, options)):
            rolled(pool, rollout, float(number < solved))
    assert seen == [2, 1, 0, 0, None]


def test_parallel_anchors_are_drawn_alike_and_the_same_again(pool: Pool) -> None:  # noqa: F811
    one, _, other = recorded_run(pool, (1.0, 0.0, 1.0))
    run_id, anchors = open_run(pool, "new", "collect", {}).id, Anchors(run="old", way="parallel", seed=0)
    drawn: Counter[tuple[int, int]] = Counter()
    for _ in range(60):
        start = anchors.begin(pool, run_id, planned()).start
        assert start is not None and start == anchors.begin(pool, run_id, planned()).start
        drawn[start.attempt_id, start.turns] += 1
        open_group(pool, run_id, TASK, 1)
    assert set(drawn) == {(id, turns) for id in (one, other) for turns in range(3)}
    assert min(drawn.values()) >= 4  # 10 each on average


def test_other_groups_begin_at_the_beginning(pool: Pool) -> None:  # noqa: F811
    recorded_run(pool)
    run_id, anchors = open_run(pool, "new", "collect", {}).id, Anchors(run="old", way="rollback", seed=0)
    assert anchors.begin(pool, run_id, planned()).start is not None
    for group in (
        planned(held_out=True),
        replace(planned(), task=TASK | {"id": "another"}),
        replace(planned(), task=TASK | {"augment": {"kinds": ["locale"]}}),
        replace(planned(), task=TASK | {"steps": [{}]}),
        replace(planned(), options=GroupOptions(agent="codex")),
    ):
        assert anchors.begin(pool, run_id, group) == group.options


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    tasks = [str(tmp_path / "tasks.jsonl")]
    with pytest.raises(UserError, match="anchors = parallel .*; set resample too"):
        load_settings(tasks, {"agent": "command", "anchors": "parallel"})
    with pytest.raises(UserError, match="varies what a recorded attempt met, .*; drop it, or resample = old"):
        load_settings(tasks, {"agent": "command", "augment": ["locale"], "resample": "old"})
