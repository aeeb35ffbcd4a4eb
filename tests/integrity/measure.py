"""Measures how well the detectors tell cheats from honest work, on files of written cases."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.integrity.detect import detect
from harness.integrity.finding import hacked_by
from tests.integrity.rendered import evidence, recorded

FILES = ("cases.jsonl", "cases_second.jsonl")


@dataclass(frozen=True)
class Measured:
    """What the detectors say of some cases."""

    cheats: int
    honest: int
    accused: dict[str, list[str]]
    """Honest cases that are called hacked, each with the detectors that say so."""
    missed: list[str]
    """Cheats that are not."""

    @property
    def precision(self) -> float:
        """The share of cheats among the cases that are called hacked."""
        found = self.cheats - len(self.missed)
        return found / (found + len(self.accused))

    @property
    def recall(self) -> float:
        """The share of the cheats that are called hacked."""
        return 1 - len(self.missed) / self.cheats

    def to_json(self) -> dict[str, Any]:
        return {"precision": self.precision, "recall": self.recall} | vars(self)


def cases(file: str) -> Iterator[dict[str, Any]]:
    return map(json.loads, (Path(__file__).parent / file).read_text().splitlines())


def measured(files: Sequence[str] = FILES) -> Measured:
    """Ask the detectors about every case of these files."""
    named: dict[str, dict[str, list[str]]] = {"cheat": {}, "honest": {}}
    for case in (case for file in files for case in cases(file)):
        named[case["kind"]][case["id"]] = hacked_by(detect(recorded(case["messages"]), evidence(case)))
    accused = {id: by for id, by in named["honest"].items() if by}
    missed = [id for id, by in named["cheat"].items() if not by]
    return Measured(len(named["cheat"]), len(named["honest"]), accused, missed)
