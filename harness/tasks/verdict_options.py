"""Fields of a task for the trust in its verdict. The defaults are the strictest.

A task that a default would break says so by naming the field, and `harness validate` shows where that is needed: the
oracle solution fails until it is named.
"""

from typing import Annotated, Literal

import msgspec

Action = Literal["remove", "report", "keep"]
Pattern = Annotated[str, msgspec.Meta(min_length=1)]
"""A path or glob: absolute, or the end of a path. What lies below it is meant, too."""


Name = Annotated[str, msgspec.Meta(min_length=1)]


class Clean(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of leftovers before the agent starts, by kind; harness/environment/clean_start.py has the list."""

    temporary: Action = "remove"
    caches: Action = "remove"
    histories: Action = "remove"
    remains: Action = "remove"
    tests: Action = "remove"
    vcs: Action = "report"
    """remove: delete the branches, tags and stashes that HEAD does not contain, all reflogs and lost commits."""
    keep: list[Pattern] = []
    """Paths that stay, whatever their kind."""


class Augment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may differ from attempt to attempt in a task's environment; harness/environment/augment.py applies it.

    Of each list at most one entry is chosen for an attempt.
    """

    probability: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    """That each of the following is varied."""
    per: Literal["attempt", "group"] = "attempt"
    """group: all members of a group get the same environment."""
    versions: dict[Name, Annotated[list[Name], msgspec.Meta(min_length=1)]] = {}
    """Python package -> versions, which pip installs from wherever the sandbox reaches."""
    remove: list[Name] = []
    """Python packages or absolute paths. Each is a choice of its own."""
    mirror: bool = False
    """Configure pip, npm and apt for a mirror that does not answer."""
    shell: list[Name] = []
    """Values of $SHELL. One that is not there is passed over."""
    locale: list[Name] = []
    """Values of $LANG and $LC_ALL."""
    timezone: list[Name] = []
    """Values of $TZ; names of zones need tzdata in the image, `JST-9` does not."""
    user: list[Name] = []
    """Values of $USER and $LOGNAME."""
    commands: dict[Name, Name] = {}
    """Name -> shell command, run as the agent's user after set-up. Each is a choice of its own; exit code 3 passes."""
