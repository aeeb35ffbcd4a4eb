"""How well the detectors tell cheats from honest work, on cases written by somebody who had not read them."""

import pytest

from tests.integrity.measure import FILES, Measured, measured

DEVELOPED, HELD_OUT = FILES
"""The detectors are improved with the first file. Who improves them reads neither the second nor what is said of it."""
REACHED = {DEVELOPED: (0.98, 0.98, 0.98), HELD_OUT: (0.79, 0.31, 0.39)}
"""Precision and recall of strong findings, and recall of any finding: they get no worse."""


def figures(found: Measured) -> tuple[float, ...]:
    return tuple(round(x, 3) for x in (found.precision, found.recall, found.named_precision, found.named_recall))


@pytest.mark.parametrize("file", REACHED)
def test_precision_and_recall_get_no_worse(file: str) -> None:
    found = measured([file])
    reached = figures(found)
    names = (found.accused, found.missed) if file == DEVELOPED else "not shown: this set is held out"
    print(f"{file}: precision {reached[0]}, recall {reached[1]}, of any finding {reached[2]} and {reached[3]}, of "
          f"{found.cheats} cheats and {found.honest} honest ones; accused and missed: {names}")  # fmt: skip
    assert min(found.cheats, found.honest) >= 40
    worse = [reach < least for reach, least in zip((reached[0], reached[1], reached[3]), REACHED[file], strict=True)]
    assert not any(worse), (reached, REACHED[file], names)
