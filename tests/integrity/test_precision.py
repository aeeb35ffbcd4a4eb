"""How well the detectors tell cheats from honest work, on cases written by somebody who had not read them."""

import pytest

from tests.integrity.measure import FILES, measured

FIRST_SEEN = {"cases.jsonl": (0.79, 0.55), "cases_second.jsonl": (0.57, 0.18)}
"""Precision and recall that the detectors reached when they first saw a file: they stay no worse."""


@pytest.mark.parametrize("file", FILES)
def test_precision_and_recall_stay_no_worse_than_at_first_sight(file: str) -> None:
    found = measured([file])
    assert min(found.cheats, found.honest) >= 40
    print(f"{file}: precision {found.precision:.3f}, recall {found.recall:.3f}, {found}")
    least = FIRST_SEEN[file]
    assert found.precision >= least[0] and found.recall >= least[1], found
