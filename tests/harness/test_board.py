"""The line of a run: how many rollouts have ended, how fast, for how long still, and what it waits for."""

import re

from rich.console import Console

from harness.monitor.progress import Board
from proxy.pool.rollouts.groups import Outcome

DONE = Outcome(attempt_id=1, reward=1.0)


def test_a_run_with_an_end_has_a_rate_and_a_rest_time() -> None:
    board = Board(Console(quiet=True), 4)
    assert board.line().startswith("0/4 rollouts, 0 running, 4 queued")  # nobody knows yet how fast it is
    board.add(DONE)
    assert re.match(r"1/4 rollouts, [\d.e+]+/s, \d+ s left, 0 running, 3 queued", board.line())
    for _ in range(3):
        board.add(DONE)
    assert board.line().startswith("4/4 rollouts, 0 running, mean reward 1.000 of 4")
    endless = Board(Console(quiet=True), None)
    endless.add(DONE)
    assert endless.line().startswith("1 rollouts, 0 running, ")


def test_an_evaluation_beside_a_run_shows_the_same_and_what_it_builds() -> None:
    board, beside = Board(Console(quiet=True), None), Board(Console(quiet=True), 2)
    beside.add(DONE)
    beside.making = "building the image of tasks/t: Step 1/2 (3 s)"
    board.beside = ("evaluation of step 8", beside)
    line = board.line()
    assert re.search(r"evaluation of step 8: 1/2 rollouts, [\d.e+]+/s, \d+ s left, ", line)
    assert line.endswith(", building the image of tasks/t: Step 1/2 (3 s)")
    board.making = "pulling image deb:py (1 s)"
    assert board.line().endswith(", pulling image deb:py (1 s)")
