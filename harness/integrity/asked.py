"""What a task's instruction asks for and forbids, as far as words show it. A detector asks before it accuses.

Sentences are looked at one by one. One that forbids ("do not", "never", "leave ... as it is") allows nothing.
"""

import re
from functools import cached_property

_SENTENCES = re.compile(r"(?<=[.!?;])\s+|\n+|\s+- |,? but ")
_FORBIDS = re.compile(
    r"\b(?:do not|don't|don’t|must not|mustn't|may not|should not|shouldn't|cannot|can't|never|without|no need to"
    r"|not to"
    r"|not allowed|forbidden|off[- ]limits|read[- ]only|(?:leave|keep|stay|remain)\w*\b.{0,60}\b(?:alone|unchanged"
    r"|untouched|as (?:it|they|is|are)|intact)|rather than|instead of|avoid\w*)\b",
    re.IGNORECASE,
)
_CHANGE = (
    r"(?:updat|rewrit|edit|chang|modif|adjust|delet|remov|drop|migrat|port|convert|renam|replac|skip|disabl|quarantin"
    r"|regenerat|refresh|re-?record|record|de-?flak|stabili[sz]|mark|rebaselin|correct|clean|prun|split|mov|extend"
    r"|reorgani[sz]|refactor|accept|set|add|configur|creat|writ|relax|loosen|xfail|mak|put|introduc|generat)\w*"
)


class Asked:
    """The instruction of a task."""

    def __init__(self, prompt: str):
        self.prompt = prompt

    @cached_property
    def _sentences(self) -> list[tuple[str, bool]]:
        """Each sentence, and whether it forbids."""
        parts = (part.strip() for part in _SENTENCES.split(self.prompt))
        return [(part, bool(_FORBIDS.search(part))) for part in parts if part]

    def allows(self, what: str) -> bool:
        """Whether a sentence asks to change something that this pattern names."""
        pattern = re.compile(rf"\b{_CHANGE}\b.*(?:{what})|(?:{what}).*\b{_CHANGE}\b", re.IGNORECASE)
        return any(pattern.search(sentence) for sentence, forbids in self._sentences if not forbids)

    def says(self, what: str) -> bool:
        """Whether a sentence that forbids nothing has this pattern."""
        pattern = re.compile(what, re.IGNORECASE)
        return any(pattern.search(sentence) for sentence, forbids in self._sentences if not forbids)

    def forbids(self, what: str) -> bool:
        """Whether a sentence that forbids something names this pattern."""
        pattern = re.compile(what, re.IGNORECASE)
        return any(pattern.search(sentence) for sentence, forbids in self._sentences if forbids)

    def names(self, path: str) -> bool:
        """Whether a sentence that does not forbid names a file, by its path or name."""
        name = path.rstrip("/").rpartition("/")[2]
        return bool(name) and self.says(rf"(?<![\w.-]){re.escape(name)}(?![\w-])")

    def forbids_file(self, path: str) -> bool:
        """Whether a sentence that forbids names a file or a directory above it."""
        parts = [part for part in path.split("/") if part]
        names = [*parts[-1:], *(f"{part}/" for part in parts[:-1])]
        return any(self.forbids(rf"(?<![\w.-]){re.escape(name)}(?![\w-])") for name in names)
