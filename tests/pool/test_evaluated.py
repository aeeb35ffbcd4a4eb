"""What evaluations came to, from rollouts written by hand: replaced ones, cheats, and some that were cut short."""

from dataclasses import replace

import pytest

from harness.commands.evaluations import show_evaluations
from harness.monitor.progress import make_console
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.inspect.evaluated import matrix, point_line, points
from proxy.pool.rollouts.groups import DEFAULTS, Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from proxy.pool.training.evaluations import Evaluation, find_teacher, is_finished, open_evaluation
from proxy.pool.training.steps import Published
from tests.pool.make import TASK, publish_next

SOLVED = Outcome(attempt_id=None, reward=1.0)
FAILED = replace(SOLVED, reward=0.0)
LOST = replace(SOLVED, reward=None, failure="tool_flake")


@pytest.fixture
def evaluation(pool: Pool) -> Evaluation:
    """An evaluation of two rollouts, which have not begun."""
    run = open_run(pool, "train", "train", {})
    version = publish_next(pool, run.id, Published(step=0, checkpoint="c", hf_dir="h", metrics={}))
    return open_evaluation(pool, run, version, {}, engine="", rollouts=2)


def ended(pool: Pool, evaluation: Evaluation, outcome: Outcome, replaces: int | None = None) -> int:
    """Open a group of one rollout and end it; the group's id."""
    [member] = open_group(pool, evaluation.run_id, TASK, 1, replace(DEFAULTS, agent="a", replaces=replaces))
    finish_rollout(pool, member.rollout_id, outcome)
    return member.group_id


def test_a_replacement_does_not_stand_for_a_rollout_that_was_never_opened(pool: Pool, evaluation: Evaluation) -> None:
    first = ended(pool, evaluation, LOST)
    ended(pool, evaluation, SOLVED, replaces=first)
    assert not is_finished(pool, evaluation) and matrix(pool) == []
    second = ended(pool, evaluation, LOST)
    assert not is_finished(pool, evaluation)  # its replacement is owed
    ended(pool, evaluation, FAILED, replaces=second)
    assert is_finished(pool, evaluation) and [row.step for row in matrix(pool)] == [0]


def test_only_the_newest_rollout_of_a_chain_of_replacements_counts(pool: Pool, evaluation: Evaluation) -> None:
    first = ended(pool, evaluation, LOST)
    ended(pool, evaluation, LOST, replaces=first)
    ended(pool, evaluation, SOLVED, replaces=first)
    ended(pool, evaluation, FAILED)
    [point] = points(pool, [evaluation])
    assert (point.rollouts, point.rewards, point.reward, point.text) == (2, 2, 0.5, "0.500 of 2")


def test_masked_cheats_are_counted_and_no_part_of_the_mean(pool: Pool, evaluation: Evaluation) -> None:
    ended(pool, evaluation, replace(SOLVED, hacked="mask"))
    ended(pool, evaluation, replace(SOLVED, reward=None, failure="verifier"))
    [point] = points(pool, [evaluation])
    assert (point.reward, point.text) == (None, "- (1 missing, 1 masked)")
    ended(pool, evaluation, FAILED)
    [point] = points(pool, [evaluation])
    assert (point.rollouts, point.masked, point.rewards, point.reward) == (3, 1, 1, 0.0)
    assert point_line(evaluation.of, [point]) == (
        "evaluation of step 0 (v1): a (held out), held-out tasks 0.000 of 1, 1 missing, 1 masked"
    )


def test_the_matrix_has_a_title_that_says_what_it_holds(
    pool: Pool, evaluation: Evaluation, capsys: pytest.CaptureFixture[str]
) -> None:
    show_evaluations(make_console(), pool, points(pool, [evaluation]))
    assert "Mean rewards by policy" in capsys.readouterr().out


def test_no_run_for_evaluation_is_a_teacher(pool: Pool, evaluation: Evaluation) -> None:
    assert find_teacher(pool, "train").purpose == "train"
    open_run(pool, "before", "eval", {"tasks": "x", "agent": "opencode", "group_size": 1, "seed": 0})
    for name, what in (("before", "is of `harness eval`"), (evaluation.name, "evaluates the run 'train'")):
        with pytest.raises(UserError, match=f"^run '{name}' {what}, so nothing is trained on it; name another run, "):
            find_teacher(pool, name)
