"""The scripts that a text is written in, other than Latin."""

import re
from collections.abc import Collection

LETTERS = {
    "han": "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff",
    "kana": "\u3041-\u30ff",
    "hangul": "\u1100-\u11ff\uac00-\ud7a3",
    "cyrillic": "\u0400-\u052f",
    "greek": "\u0370-\u03ff",
    "arabic": "\u0620-\u06ff",
    "hebrew": "\u05d0-\u05ea",
    "devanagari": "\u0900-\u097f",
    "thai": "\u0e01-\u0e5b",
}
"""Script -> its letters, as a class of a regular expression."""
ENDS = 2048
"""Characters at each end of a text in which `scripts` looks, as it runs for every request."""
SHORTEST = {"han": 2, "kana": 2, "hangul": 2, "greek": 4, "thai": 2}
"""Letters in a row that make a word, where it is not 3: formulas have single Greek letters, faces a single kana."""
TOGETHER = {"han": ("kana", "hangul"), "kana": ("han",), "hangul": ("han",)}
"""Scripts that are written beside one another."""
_ANY = re.compile(f"[{''.join(LETTERS.values())}]")
_LETTER = {script: re.compile(f"[{letters}]") for script, letters in LETTERS.items()}
_WORD = {script: re.compile(f"[{letters}]{{{SHORTEST.get(script, 3)},}}") for script, letters in LETTERS.items()}


def scripts(text: str) -> tuple[str, ...]:
    """Return the scripts that have a letter in a text, of a long one at its ends."""
    return present(text if len(text) <= 2 * ENDS else text[:ENDS] + text[-ENDS:])


def present(text: str) -> tuple[str, ...]:
    """Return the scripts that have a letter anywhere in a text."""
    if text.isascii() or not _ANY.search(text):
        return ()
    different = "".join(set(text))  # few, however long the text is
    return tuple(script for script, letter in _LETTER.items() if letter.search(different))


def usual(seen: Collection[str]) -> set[str]:
    """Return the scripts that are expected where these were seen."""
    return {*seen, *(other for script in seen for other in TOGETHER.get(script, ()))}


def words(text: str, script: str) -> list[str]:
    """Return the words of a script in a text: as many letters in a row as show that somebody writes in it."""
    return _WORD[script].findall(text)
