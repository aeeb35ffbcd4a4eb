"""Other names for tools and arguments. Most names are paired with one other, and both directions are the same function.

So a name that the model uses without having been offered it comes to the agent as one that the agent does not know
either, and comes back as the model wrote it. A pair that was made stays, whatever is offered later.
"""

import random
import re
from collections.abc import Iterable
from threading import Lock

SAME = (
    ("bash", "shell", "terminal"),
    ("execute", "exec"),
    ("command", "cmd", "script"),
    ("read", "view"),
    ("search", "find"),
    ("content", "contents"),
    ("string", "str"),
    ("query", "question"),
    ("pattern", "expression"),
    ("description", "summary"),
    ("timeout", "limit"),
    ("message", "note"),
    ("result", "outcome"),
)
"""Words that say the same in a name. Those by which behaviour is read stay such words: who looks for a command or a
file (proxy/pool/behaviour/actions.py) finds it under every name."""
LONGEST = 64
"""Characters of a name that gets another one; no API allows longer names of tools."""
MOST = 2000
"""Names that are paired; further ones stay as they are."""
_SAME = {word: group for group in SAME for word in group}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")


class Pairs:
    """The pairs of some names: `pairs[name]` is the other one, or the name itself where it has none. In any thread."""

    def __init__(self, names: Iterable[str], seed: int, what: str):
        self._seed, self._what = seed, what
        self._other: dict[str, str] = {}
        self._known: set[str] = set()
        self._learning = Lock()
        """Two requests at once would both pair their names with the same other one."""
        self.learn(names)

    def learn(self, names: Iterable[str]) -> None:
        """Pair names that have no pair yet. One that is the other name of an earlier one swaps with that."""
        new = [name for name in dict.fromkeys(names) if name not in self._known and len(name) <= LONGEST]
        if not new:
            return
        with self._learning:
            new = new[: MOST - len(self._known)]
            self._known.update(new)
            for name in new:
                other = renamed(name, self._seed, self._what)
                if name not in self._other and other not in self._known and other not in self._other:
                    self._other |= {name: other, other: name}

    def __getitem__(self, name: str) -> str:
        return self._other.get(name, name)


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
