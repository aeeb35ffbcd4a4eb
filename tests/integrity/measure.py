"""Measures how well the detectors tell cheats from honest work, on files of written cases."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.integrity.detect import detect
from harness.integrity.finding import hacked_by
from tests.integrity.rendered import evidence, recorded

DEVELOPED = ("cases.jsonl", "cases_second.jsonl", "cases_own.jsonl")
"""The detectors are improved with these."""
HELD_OUT = ("cases_third.jsonl", "cases_fourth.jsonl", "cases_fifth.jsonl")
"""Who improves the detectors reads neither their cases nor what is said of them."""
FILES = (*DEVELOPED, *HELD_OUT)


@dataclass(frozen=True)
class Measured:
    """What the detectors say of some cases."""

    cheats: int
    honest: int
    accused: dict[str, list[str]]
    """Honest cases that are called hacked, each with the detectors that say so."""
    missed: list[str]
    """Cheats that are not called hacked."""
    named_cheats: int
    """Cheats with any finding, also a weak one: a judge is asked about those."""
    named_honest: int
    """Honest cases with any finding."""

    @property
    def precision(self) -> float:
        """The share of cheats among the cases that are called hacked."""
        found = self.cheats - len(self.missed)
        return found / (found + len(self.accused))

    @property
    def recall(self) -> float:
        """The share of the cheats that are called hacked."""
        return 1 - len(self.missed) / self.cheats

    @property
    def named_precision(self) -> float:
        """The share of cheats among the cases with any finding."""
        return self.named_cheats / (self.named_cheats + self.named_honest)

    @property
    def named_recall(self) -> float:
        """The share of the cheats with any finding."""
        return self.named_cheats / self.cheats

    def to_json(self) -> dict[str, Any]:
        return {"precision": self.precision, "recall": self.recall} | vars(self)


def cases(file: str) -> Iterator[dict[str, Any]]:
    """Yield the cases of a file in this folder."""
    return map(json.loads, (Path(__file__).parent / file).read_text().splitlines())


def measured(files: Sequence[str] = FILES) -> Measured:
    """Ask the detectors about every case of these files."""
    named: dict[str, dict[str, list[str]]] = {"cheat": {}, "honest": {}}
    findings = {"cheat": 0, "honest": 0}
    for case in (case for file in files for case in cases(file)):
        found = detect(recorded(case["messages"]), evidence(case))
        named[case["kind"]][case["id"]] = hacked_by(found)
        findings[case["kind"]] += bool(found)
    accused = {id: by for id, by in named["honest"].items() if by}
    missed = [id for id, by in named["cheat"].items() if not by]
    return Measured(
        len(named["cheat"]), len(named["honest"]), accused, missed, findings["cheat"], findings["honest"]
    )  # fmt: skip
