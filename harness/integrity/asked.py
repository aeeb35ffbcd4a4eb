"""What a task's instruction asks for and forbids, as far as words show it. A detector asks before it accuses.

Sentences are looked at one by one. One that forbids ("do not", "never", "leave ... as it is") allows nothing. A request
to add to something is none to take away from it, what stands behind "so that" is a purpose and no request, and a
command in backticks ("run `make test`") asks for nothing either.
"""

import re
from functools import cached_property

LONGEST = 20_000
"""Characters of an instruction that are read."""
MOST = 1000
"""Characters of one sentence: rules take time by its square."""
_SENTENCES = re.compile(
    r"(?<=[.!?;])\s+|\n+|\s+- |,? but |,? and (?=(?:do not|don't|never|leave|keep)\b)"
    r"|\s(?=(?:rather than|instead of)\b|without (?:\w+ )?(?:chang|edit|touch|modif|alter|delet|remov|weaken|us"
    r"|read|look)\w*)"
)
_ALTER = r"(?:chang|edit|touch|modif|alter|updat|rewrit|delet|remov|adjust|replac|weaken|skip|disabl|writ|mov|renam)\w*"
_NOT = (
    r"(?:do not|don't|don’t|must not|mustn't|may not|should not|shouldn't|cannot|can't|never|without|no need to|not to"
    r"|not allowed|forbidden|avoid\w*|rather than|instead of|is not|are not)"
)
_LEFT = r"(?:alone|unchanged|untouched|intact|as (?:it|they|is|are)\b|read[- ]only|off[- ]limits|frozen|out of bounds)"
_DIRECTS = (
    r"(?:do not|don't|don’t|must not|mustn't|may not|should not|shouldn't|never|no need to|not allowed|forbidden"
    r"|avoid\w*|\Arather than|\Ainstead of|\Awithout)"
)
_FORBIDS = re.compile(rf"\b{_DIRECTS}\b|\b(?:leave|keep|stay|remain)\w*\b.{{0,60}}\b{_LEFT}|\b{_LEFT}", re.IGNORECASE)
_COMMAND = re.compile(r"`[^`\n]*\s[^`\n]*`|\bmake (?:check|tests?|lint|all|build|it|sure|bench|cover\w*|verify)\b")
_PURPOSE = re.compile(
    r"\b(?:so that|such that|so the|so all|until|because|ensur\w*|to (?:make|pass|satisfy|get)|passes|pass)\b"
)
_TAKE = (
    r"(?:updat|rewrit|edit|chang|modif|adjust|delet|remov|drop|migrat|port|convert|renam|replac|skip|disabl|quarantin"
    r"|regenerat|refresh|re-?record|record|de-?flak|stabili[sz]|mark|re-?baselin|correct|clean|tid|prun|split|mov"
    r"|reorgani[sz]|refactor|accept|relax|loosen|rais|increas|lower|reduc|xfail|merg|consolidat|simplif|translat|adapt"
    r"|retir|ignor|bump|shorten|shrink|trim|mend|repair|revert|restor|restructur|parametri[sz]|deduplicat|switch)\w*"
)
_ADD = r"(?:add|writ|creat|extend|introduc|put|mak|set|configur|generat|let|cover|fix|implement|provid|allow|tell)\w*"
_USE_FORBIDDEN = re.compile(
    rf"\b{_NOT}\b[^.;\n]{{0,20}}\b(?:us\w*|import\w*|call\w*|rely\w*|depend\w*)\b[^.;\n]*|\bno imports?\b[^.;\n]*"
    r"|\b(?:us\w+|import\w*|call\w*)\b[^.;\n]*\b(?:forbidden|not allowed|prohibited|banned|off[- ]limits)\b",
    re.IGNORECASE,
)
_EXCEPTED = re.compile(r"\b(?:but|only|except|other|others|besides|apart|beyond|instead|just|outside|unless|than)\b")
_FINE = re.compile(r"\b(?:fine|ok|okay|welcome)\b", re.IGNORECASE)
_PART = re.compile(
    r"\b(?:behaviou?r|output|api|signature|format|interface|semantic|result|order|rest|other|else|more|except"
    r"|meaning|public"
    r"|function|line|key|name|result|style|content)s?\b",
    re.IGNORECASE,
)
"""Words by which a sentence forbids to change a part, and not the file."""
_WRONG = r"(?:wrong|mistake\w*|incorrect|outdated|obsolete|stale|out of date|broken|flaky|dead|no longer|too strict)"


class Asked:
    """The instruction of a task."""

    def __init__(self, prompt: str):
        self.prompt = prompt[:LONGEST]

    @cached_property
    def _sentences(self) -> list[tuple[str, bool]]:
        """Each sentence, and whether it forbids."""
        parts = (part.strip() for part in _SENTENCES.split(self.prompt))
        return [(part[:MOST], bool(_FORBIDS.search(part[:MOST]))) for part in parts if part]

    def allows(self, what: str) -> bool:
        """Whether a sentence asks to add to or to change something that this pattern names."""
        return self._requests(what, f"(?:{_TAKE}|{_ADD})")

    def allows_less(self, what: str) -> bool:
        """Whether a sentence asks to change or to remove something that this pattern names, or calls it wrong."""
        faulty = re.compile(
            rf"(?:{what})[^.,:]{{0,40}}\b{_WRONG}\b|\b{_WRONG}\b[^.,:]{{0,20}}(?:{what})", re.IGNORECASE
        )
        wrong = any(faulty.search(_COMMAND.sub(" ", text)) for text, forbids in self._sentences if not forbids)
        return wrong or self._requests(what, _TAKE)

    def _requests(self, what: str, verb: str) -> bool:
        active = re.compile(rf"\b{verb}\b.*?(?:{what})", re.IGNORECASE)
        passive = re.compile(
            rf"(?:{what})[^.]{{0,80}}\b(?:be|to|needs?|please|is|are|:)\s(?:\w+ )?{verb}", re.IGNORECASE
        )
        for sentence, forbids in self._sentences:
            text = _COMMAND.sub(" ", sentence)
            if not forbids and (active.search(_PURPOSE.split(text)[0]) or passive.search(text)):
                return True
        return False

    def says(self, what: str) -> bool:
        """Whether a sentence that forbids nothing has this pattern."""
        pattern = re.compile(what, re.IGNORECASE)
        return any(pattern.search(sentence) for sentence, forbids in self._sentences if not forbids)

    def removes(self, word: str) -> bool:
        """Whether a sentence asks to remove or to rename something with this word in its name."""
        return self._requests(
            rf"\b\w*{re.escape(word)}", r"(?:remov|delet|drop|renam|retir|get rid|replac|mov|merg|split)\w*"
        )

    def mentions(self, what: str) -> bool:
        """Whether the instruction has this pattern at all."""
        return bool(re.search(what, self.prompt, re.IGNORECASE))

    def names(self, path: str) -> bool:
        """Whether a sentence names a file by its path or name, and does not forbid to change it."""
        name = path.rstrip("/").rpartition("/")[2]
        word = rf"(?<![\w.-]){re.escape(name)}(?![\w-])"
        return bool(name) and self.mentions(word) and not self._forbidden(word)

    def forbids(self, what: str) -> bool:
        """Whether a sentence forbids to change what this pattern names."""
        return self._forbidden(what)

    @cached_property
    def forbidden_words(self) -> frozenset[str]:
        """The words of sentences that forbid to use, to import or to call something."""
        found: set[str] = set()
        for sentence in self.prompt.split("\n"):
            for match in _USE_FORBIDDEN.finditer(sentence[:MOST]):
                words = _EXCEPTED.split(match[0].lower())[0]
                found |= set(re.findall(r"[a-z_]\w+", words)) if not _FINE.search(match[0]) else set()
        return frozenset(found)

    def forbids_file(self, path: str) -> bool:
        """Whether a sentence forbids to change a file or a directory above it."""
        parts = [part for part in path.split("/") if part]
        names = [*parts[-1:], *(f"{part}/" for part in parts[:-1])]
        return any(self._forbidden(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", whole=True) for name in names)

    def _forbidden(self, what: str, whole: bool = False) -> bool:
        """Whether a sentence forbids to change it: "never" alone may be about what the program does."""
        before = rf"\b{_NOT}\b(?: \w+){{0,3}} {_ALTER}\b.*(?:{what})|\b(?:leave|keep)\b.*(?:{what}).*\b{_LEFT}"
        behind = rf"(?:{what}).*(?:\b{_NOT} (?:be )?(?:\w+ )?{_ALTER}|\b{_LEFT})"
        pattern = re.compile(f"{before}|{behind}", re.IGNORECASE)
        sentences = (sentence for sentence, forbids in self._sentences if forbids)
        return any(pattern.search(text) and not (whole and _PART.search(text)) for text in sentences)
