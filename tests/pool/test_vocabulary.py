"""Fingerprints of tokenizers: the same for the same ids, whatever else the files say."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from proxy.pool.tokenizer_fingerprint import fingerprint


def write(directory: Path, **parts: object) -> Path:
    directory.mkdir()
    (directory / "tokenizer.json").write_text(json.dumps(parts))
    return directory


ADDED = [{"id": 2, "content": "<end>", "special": True}]


def test_the_same_ids_have_the_same_fingerprint_in_any_form(tmp_path: Path) -> None:
    by_name = write(tmp_path / "a", model={"type": "BPE", "vocab": {"x": 0, "y": 1}}, added_tokens=ADDED, version="1.0")
    by_place = write(tmp_path / "b", added_tokens=ADDED, model={"vocab": [["x", -1.0], ["y", -2.0], ["<end>", 0.0]]})
    tokenizer = Tokenizer(models.BPE({"x": 0, "y": 1}, []))
    tokenizer.add_special_tokens(["<end>"])
    (tmp_path / "c").mkdir()
    tokenizer.save(str(tmp_path / "c" / "tokenizer.json"))
    assert fingerprint(by_name) == fingerprint(by_place) == fingerprint(tmp_path / "c") is not None


@pytest.mark.parametrize(
    ("vocab", "added"), [({"y": 0, "x": 1}, ADDED), ({"x": 0, "y": 1}, []), ({"x": 0, "z": 1}, ADDED)]
)
def test_other_ids_have_another(vocab: dict[str, int], added: list[object], tmp_path: Path) -> None:
    one = write(tmp_path / "a", model={"vocab": {"x": 0, "y": 1}}, added_tokens=ADDED)
    assert fingerprint(write(tmp_path / "b", model={"vocab": vocab}, added_tokens=added)) != fingerprint(one)


def test_a_directory_that_does_not_tell_has_none(tmp_path: Path) -> None:
    assert fingerprint(tmp_path) is None
    assert fingerprint(write(tmp_path / "a")) is None
    (tmp_path / "a" / "tokenizer.json").write_text("no JSON")
    assert fingerprint(tmp_path / "a") is None
