"""Other names for tools and arguments. Each name is paired with one other: both directions are the same function.

So a name that the model uses without having been offered it comes to the agent as one that the agent does not know
either, and comes back as the model wrote it.
"""

import random
import re
from collections.abc import Iterable
from functools import lru_cache

SAME = (
    ("bash", "shell", "terminal"),
    ("execute", "exec", "run"),
    ("command", "cmd", "line"),
    ("read", "view", "open"),
    ("write", "save", "create"),
    ("edit", "modify", "change"),
    ("search", "find", "lookup"),
    ("grep", "match"),
    ("list", "ls"),
    ("file", "document"),
    ("path", "location"),
    ("directory", "folder", "dir"),
    ("content", "contents", "text"),
    ("query", "question"),
    ("pattern", "expression"),
    ("description", "summary"),
    ("timeout", "limit"),
    ("old", "before"),
    ("new", "after"),
    ("string", "str"),
    ("name", "title"),
    ("url", "address"),
    ("message", "note"),
    ("result", "outcome"),
    ("tool", "action"),
)
"""Words that say the same in a name."""
_SAME = {word: group for group in SAME for word in group}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


class Pairs:
    """The pairs of some names: `pairs[name]` is the other one, or the name itself where it has none."""

    def __init__(self, names: Iterable[str], seed: int, what: str):
        self._other: dict[str, str] = {}
        known = list(dict.fromkeys(names))
        taken = set(known)
        for name in known:
            other = renamed(name, seed, what)
            if other not in taken:
                taken.add(other)
                self._other |= {name: other, other: name}

    def __getitem__(self, name: str) -> str:
        return self._other.get(name, name)


@lru_cache(4096)
def renamed(name: str, seed: int, what: str) -> str:
    """Another name of the same meaning: words of the same sense, written in the style that the seed has for all."""
    style = random.Random(f"{seed}/{what}/style").choice(("snake", "camel", "pascal"))
    draws = random.Random(f"{seed}/{what}/{name}")
    words = [draws.choice(_SAME.get(word.lower(), (word.lower(),))) for word in _WORD.findall(name)]
    if not words:
        return name
    if style == "snake":
        return "_".join(words)
    first = words[0] if style == "camel" else words[0].capitalize()
    return first + "".join(word.capitalize() for word in words[1:])
