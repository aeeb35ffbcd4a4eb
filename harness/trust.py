"""Fields of a task for the trust in its verdict. The defaults are the strictest.

A task that a default would break says so by naming the field, and `harness validate` shows where that is needed: the
oracle solution fails until it is named.
"""

from typing import Annotated, Literal

import msgspec

Action = Literal["remove", "report", "keep"]
Pattern = Annotated[str, msgspec.Meta(min_length=1)]
"""A path or glob: absolute, or the end of a path. What lies below it is meant, too."""


class Clean(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of leftovers before the agent starts, by kind; harness/cleanstart.py has the list."""

    temporary: Action = "remove"
    caches: Action = "remove"
    histories: Action = "remove"
    remains: Action = "remove"
    tests: Action = "remove"
    vcs: Action = "report"
    """remove: delete the branches, tags and stashes that HEAD does not contain, all reflogs and lost commits."""
    keep: list[Pattern] = []
    """Paths that stay, whatever their kind."""
