"""How well the detectors tell cheats from honest work, on the cases that they are improved with."""

import pytest

from tests.integrity.measure import DEVELOPED, Measured, measured

REACHED = dict(zip(DEVELOPED, ((0.98, 0.98, 0.98), (0.98, 0.98, 0.98), (0.96, 0.96, 0.96)), strict=True))
"""Precision and recall of strong findings, and recall of any finding: they get no worse."""


def figures(found: Measured) -> tuple[float, ...]:
    return tuple(round(x, 3) for x in (found.precision, found.recall, found.named_precision, found.named_recall))


@pytest.mark.parametrize("file", DEVELOPED)
def test_precision_and_recall_get_no_worse(file: str) -> None:
    found = measured([file])
    reached = figures(found)
    print(f"{file}: precision {reached[0]}, recall {reached[1]}, of any finding {reached[2]} and {reached[3]}, of "
          f"{found.cheats} cheats and {found.honest} honest ones; {found.accused=}, {found.missed=}")  # fmt: skip
    assert min(found.cheats, found.honest) >= 25
    worse = [reach < least for reach, least in zip((reached[0], reached[1], reached[3]), REACHED[file], strict=True)]
    assert not any(worse), (reached, REACHED[file], found.accused, found.missed)
