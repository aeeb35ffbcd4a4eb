r"""The rules of a .dockerignore, as Docker reads them, in time that grows with the length of a path and of a rule.

A rule is matched from the context's root: `*` and `?` within a name, `**` across names, `[a-z]` and `[^a-z]`, `\`
before a character that means itself, `!` for an exception. The last rule that matches a path, or a directory above it,
decides.

Docker's SDK turns `*a*a*a*a*b` into a regular expression that backtracks: six wildcards and a name of 250 letters take
hours. Here each text between two wildcards is taken at the first place where it matches and never tried again (an
atomic group). That is exact, because a later place leaves less of the name to the rest of the rule.
"""

import re
import time
from collections.abc import Iterator, Sequence
from itertools import product

from sandboxes.host_files.walk import TreeError

FILE_BYTES = 64 << 10
RULES = 1000
GLUED = 4
"""Wildcards `**` of one rule that are part of a longer name. Each doubles the rule: Docker lets them match nothing."""
CPU_SECONDS = 60.0
"""CPU time for matching all files of one context. A rule takes a microsecond per file, a hostile one a millisecond."""


class IgnoreRules:
    """The rules of one file. TreeError names the file and the line of the first fault."""

    def __init__(self, text: str, where: str):
        self._where, self._spent = where, 0.0
        lines = [line.strip() for line in text.splitlines()]
        lines = [line for line in lines if line and not line.startswith("#")]
        if len(lines) > RULES:
            raise TreeError(f"{where} has more than {RULES} rules; use fewer")
        self._rules: list[tuple[re.Pattern[str], bool]] = []
        """Patterns that match the start of a path that a rule names or that lies below one; whether it ignores them."""
        for line in lines:
            cleaned = "/".join(_components(line.removeprefix("!").strip()))
            try:
                if cleaned:
                    self._rules.append((re.compile(_expression(cleaned)), not line.startswith("!")))
            except (re.error, ValueError) as error:
                raise TreeError(
                    f"{where}: {line[:100]!r} is not a rule that can be read ({error}); correct it"
                ) from error

    def ignore(self, path: str) -> bool:
        """Return whether the last rule that matches the path, or a directory above it, leaves it out."""
        began = time.thread_time()
        ignored = next((ignores for pattern, ignores in reversed(self._rules) if pattern.match(path)), False)
        self._spent += time.thread_time() - began
        if self._spent > CPU_SECONDS:
            raise TreeError(f"{self._where} takes more than {CPU_SECONDS:g} s for so many files; use fewer rules")
        return ignored


def _components(line: str) -> list[str]:
    """The names between the slashes, without `.` and with `..` applied."""
    names: list[str] = []
    for name in line.split("/"):
        if name == "..":
            del names[-1:]
        elif name not in ("", "."):
            names.append(name)
    return names


def _expression(rule: str) -> str:
    """The regular expression of a rule.

    Docker reads `**`, with a slash after it, as `(.*/)?`. Where `**` is a whole name, that is any number of
    directories. Where it is glued to a name, as in `a**b`, it is nothing (`ab`), or the rest of the name and any number
    of directories (`a*/`, then `b` at the start of a name).
    """
    groups = re.split(r"\*\*/?", rule)
    glued = [index for index, group in enumerate(groups[:-1]) if group and not group.endswith("/")]
    if rule.endswith("**") and glued and glued[-1] == len(groups) - 2:
        glued.pop()  # at the end it is anything that follows
    if len(glued) > GLUED:
        raise ValueError(f"more than {GLUED} wildcards ** beside letters")
    alternatives = []
    for nothing in product((True, False), repeat=len(glued)):
        chosen = dict(zip(glued, nothing, strict=True))
        parts = [""]
        for index, group in enumerate(groups):
            parts[-1] += group
            if index in chosen and not chosen[index]:
                parts[-1] += "*/"
            if index < len(groups) - 1 and not chosen.get(index):
                parts.append("")
        alternatives.append(_of_groups(parts))
    return "|".join(alternatives)


def _of_groups(groups: Sequence[str]) -> str:
    """The expression of texts with `**` between them; each but the last ends at the end of a name."""
    first, *others = groups
    if not others:
        return _of_names(first) + r"(?=/|\Z)"
    whole = _of_names(first)
    for group in others[:-1]:
        whole += rf"(?>(?:[^/]+/)*?{_of_names(group)})"
    return whole + (rf"(?:[^/]+/)*?{_of_names(others[-1])}(?=/|\Z)" if others[-1] else "")


def _of_names(group: str) -> str:
    """The expression of a text without `**`."""
    names = group.split("/")
    return "".join(f"(?>{_of_name(name)}/)" for name in names[:-1]) + _of_name(names[-1])


def _of_name(name: str) -> str:
    pieces = [""]
    for sign in _signs(name):
        if sign == "*":
            pieces.append("")
        else:
            pieces[-1] += sign
    first, *others = pieces
    if not others:
        return first
    middle = "".join(rf"(?>[^/]*?{piece})" for piece in others[:-1])
    return f"{first}{middle}[^/]*?{others[-1]}" if others[-1] else f"{first}{middle}[^/]*+"


def _signs(name: str) -> Iterator[str]:
    """The expression of each character: `*` for itself, everything else matches exactly one character."""
    at = 0
    while at < len(name):
        sign, at = name[at], at + 1
        if sign == "*":
            yield sign
        elif sign == "?":
            yield "[^/]"
        elif sign == "[":
            match = re.compile(r"(\^?)((?:\\.|[^\]\\])+)\]").match(name, at)
            if match is None:
                raise ValueError("a [ without its ]")
            yield f"(?!/)[{match[1]}{_of_class(match[2])}]"
            at = match.end()
        elif sign == "\\":
            if at == len(name):
                raise ValueError("a \\ with nothing after it")
            yield re.escape(name[at])
            at += 1
        else:
            yield re.escape(sign)


def _of_class(text: str) -> str:
    """The content of `[...]`: only `-` and `\\` mean what they mean there."""
    return re.sub(r"\\.|[^\w-]", lambda match: match[0] if match[0].startswith("\\") else "\\" + match[0], text)
