"""What is done about each failure, and when the groups that were lost stop a run."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from proxy.pool.rollouts.failures import CAP, FAILURES, LostGroupCap, Treatment, alarming, treatment

VECTORS = json.loads((Path(__file__).parent.parent / "trainer" / "vectors.json").read_text())


def test_every_failure_has_a_known_treatment() -> None:
    assert {treatment(kind) for kind in FAILURES} == set(get_args(Treatment))


@pytest.mark.parametrize(
    ("lost", "window", "finding"),
    [
        ("", "", ""),
        ("1" * 3, "", ""),  # the first groups of a run stop nothing
        ("1" * 4, "4 of 20", "alarm"),
        ("1" * 10, "10 of 20", "alarm"),
        ("1" * 11, "11 of 20", "stop"),
        ("0" * 17 + "1" * 4, "4 of 21", ""),
        ("10" * 100, "half is still allowed", "alarm"),
        ("1" * 300 + "0" * 512, "what lies behind the window is forgotten", ""),
        ("0" * 600 + "1" * 256, "256 of 512", "alarm"),
        ("0" * 600 + "1" * 257, "257 of 512", "stop"),
        ("1" * 257 + "0" * 255 + "0", "the window has slid by one", "alarm"),
    ],
)
def test_the_share_of_lost_groups_decides(lost: str, window: str, finding: str) -> None:
    assert alarming([group == "1" for group in lost]) == finding, window


def test_the_cap_is_a_sliding_window_with_bounds() -> None:
    assert (CAP.window, CAP.alarm, CAP.stop) == (512, 0.2, 0.5)
    assert alarming([True, False, False], LostGroupCap(fewest=3, stop=0.3)) == "stop"
    assert alarming([True, False, False], LostGroupCap(fewest=4, stop=0.3)) == "alarm"


@pytest.mark.parametrize("case", VECTORS["group_filter"])
def test_over_a_whole_run_the_cap_is_rolls_group_filter(case: dict[str, Any]) -> None:
    """ROLL drops a flagged group unless more than half of all so far would be dropped: then it goes on."""
    lifetime = LostGroupCap(window=1000, fewest=1)
    dropped: list[bool] = []
    for flag in case["flags"]:
        dropped.append(bool(flag) and alarming([*dropped, True], lifetime) != "stop")
    assert dropped == [bool(flag) for flag in case["dropped"]]
