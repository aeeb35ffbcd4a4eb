"""Events: what a completion did, in a word, with the text that shows it.

An event is an observation and no verdict: an honest agent edits tests too. Readers decide what it means.
"""

from dataclasses import dataclass
from enum import StrEnum

QUOTED = 200
"""Characters of evidence that an event keeps."""


class Kind(StrEnum):
    """What can be observed. docs/behaviour.md has the rules."""

    TOOL_CALLED = "tool_called"
    TOOL_FAILED = "tool_failed"
    MALFORMED_CALL = "malformed_call"
    UNKNOWN_TOOL = "unknown_tool"
    REPEATED_CALL = "repeated_call"
    NEAR_REPEATED_CALL = "near_repeated_call"
    RETRY_LOOP = "retry_loop"
    UNDO_LOOP = "undo_loop"
    PARALLEL_CALLS = "parallel_calls"
    OVERUSED_TOOL = "overused_tool"
    OVERUSED_SEARCH = "overused_search"
    LANGUAGE_MIXING = "language_mixing"
    REPETITION = "repetition"
    TRUNCATED = "truncated"
    EMPTY_TURN = "empty_turn"
    GIVING_UP = "giving_up"
    ENVIRONMENT_CHANGED = "environment_changed"
    DESTRUCTIVE_COMMAND = "destructive_command"
    TEST_EDITED = "test_edited"
    GRADER_READ = "grader_read"
    NETWORK = "network"
    UPSTREAM_FIX = "upstream_fix"
    GIT_HISTORY = "git_history"
    RUNNER_LEFT = "runner_left"


@dataclass(frozen=True)
class Event:
    """One observation."""

    kind: Kind
    completion: int
    """The completion that did it, by id. A tool's failure belongs to the completion that called the tool."""
    call: int | None = None
    """The place of the tool call in the reply; None: it is about the whole reply."""
    name: str = ""
    """What it is about: a tool and its command, a script, a reason."""
    quote: str = ""
    """The text that shows it, from the call, the reply or the result, at most `QUOTED` characters."""


def quoted(text: str) -> str:
    """Return evidence of at most `QUOTED` characters: of a longer text its beginning."""
    text = text.strip()
    return text if len(text) <= QUOTED else text[: QUOTED - 1] + "…"
