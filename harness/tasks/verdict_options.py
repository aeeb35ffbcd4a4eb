"""Fields of a task that decide how far its verdict can be trusted. The defaults are the strictest.

A task for which a default is too strict sets the field. `harness validate` shows where that is needed: the oracle
solution fails until the field is set.
"""

from typing import Annotated, Literal

import msgspec

Action = Literal["remove", "report", "keep"]
Pattern = Annotated[str, msgspec.Meta(min_length=1)]
"""A path or glob: absolute, or the end of a path. It includes everything below it."""
MAX_PATTERNS = 1000
"""Patterns of one list. Each is matched with the path of every file."""
Patterns = Annotated[list[Pattern], msgspec.Meta(max_length=MAX_PATTERNS)]

Name = Annotated[str, msgspec.Meta(min_length=1)]


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A struct that refuses unknown fields."""


class Clean(Strict, frozen=True, kw_only=True):
    """What to do with each kind of leftover before the agent starts; harness/environment/clean_start.py lists them."""

    temporary: Action = "remove"
    """Regular files below the directories for temporary files."""
    caches: Action = "remove"
    """Caches of package managers."""
    histories: Action = "remove"
    """What shells, REPLs, pagers and editors remember."""
    remains: Action = "remove"
    """What runs of tests leave."""
    tests: Action = "remove"
    """/tests, /solution, /oracle and /logs/verifier."""
    vcs: Action = "report"
    """remove: delete the branches, tags and stashes that HEAD does not contain, all reflogs and lost commits."""
    keep: Patterns = []
    """Paths that are kept, whatever their kind."""


class Augment(Strict, frozen=True, kw_only=True):
    """What may vary between attempts in a task's environment; harness/environment/augment.py applies it.

    At most one entry of each list is chosen for an attempt.
    """

    probability: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """Probability of each of the following variations."""
    per: Literal["attempt", "group"] = "attempt"
    """group: all members of a group get the same environment."""
    versions: dict[Name, Annotated[list[Name], msgspec.Meta(min_length=1)]] = {}
    """Python package -> versions. pip installs one from an index that the sandbox can reach."""
    remove: list[Name] = []
    """Python packages or absolute paths to remove. Each is a variation of its own."""
    mirror: bool = False
    """Configure pip, npm and apt for a mirror that does not answer."""
    shell: list[Name] = []
    """Values of $SHELL. A shell that does not exist is skipped."""
    locale: list[Name] = []
    """Values of $LANG and $LC_ALL."""
    timezone: list[Name] = []
    """Values of $TZ; names of zones need tzdata in the image, `JST-9` does not."""
    user: list[Name] = []
    """Values of $USER and $LOGNAME."""
    commands: dict[Name, Name] = {}
    """Name -> shell command, run as the agent's user after set-up. Each is a variation; exit code 3 skips it."""

    @property
    def changing(self) -> tuple[str, ...]:
        """The fields in use whose variations change files of the sandbox. The others set variables of the agent's."""
        changing = {
            "versions": self.versions,
            "remove": self.remove,
            "mirror": self.mirror,
            "commands": self.commands,
        }
        return tuple(name for name, value in changing.items() if value)
