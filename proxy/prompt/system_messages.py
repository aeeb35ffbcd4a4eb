"""System messages in the places in which a chat template shows them.

Agents send several: codex two at the beginning, claude-code one behind the user's message. Some templates show only the
first one, and some refuse the request. What stands here of a message depends on it and its neighbours up to the next
answer, so the prompt of a conversation that goes on begins as before. Left out: which way a template needs, which
proxy/prompt/template.py finds out.
"""

from collections.abc import Sequence
from itertools import product, takewhile
from typing import Any, NamedTuple

GLUE = "\n\n"
"""Stands between the texts of two messages that become one."""
KEPT, JOINED, AS_USER = "kept", "joined", "as user"


class SystemWay(NamedTuple):
    """How system messages are shown."""

    leading: str
    """Those at the beginning: KEPT, JOINED to one, or AS_USER, which treats them like later ones."""
    later: str
    """Those behind another message: KEPT, a user's message of their own (AS_USER), or JOINED with a neighbour."""


WAYS = tuple(SystemWay(*way) for way in product((KEPT, JOINED, AS_USER), (KEPT, AS_USER, JOINED)))
"""All ways. The first that shows all messages is a template's."""


def arranged(messages: Sequence[dict[str, Any]], way: SystemWay) -> Sequence[dict[str, Any]]:
    """The messages with their system messages in this way."""
    if way == WAYS[0]:
        return messages
    leading = list(takewhile(_is_system, messages)) if way.leading != AS_USER else []
    rest = messages[len(leading) :]
    if way.leading == JOINED and len(leading) > 1:
        leading = [{**leading[0], "content": _joined(*leading)}]
    if way.later == AS_USER:
        rest = [{**message, "role": "user"} if _is_system(message) else message for message in rest]
    return [*leading, *(_with_neighbours(rest) if way.later == JOINED else rest)]


def _with_neighbours(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each system message at the end of the one before it, a user's or a result.

    Behind an answer it goes to the beginning of the next one, or becomes a user's message where another answer follows.
    """
    shown: list[dict[str, Any]] = []
    for message in messages:
        before = shown[-1] if shown else {"role": "assistant"}
        if _is_system(message) and before["role"] != "assistant":
            shown[-1] = {**before, "content": _joined(before, message)}
        elif _is_system(before) and message["role"] != "assistant":
            shown[-1] = {**message, "content": _joined(before, message)}
        else:
            shown.append(message)
    return [{**message, "role": "user"} if _is_system(message) else message for message in shown]


def _is_system(message: dict[str, Any]) -> bool:
    return message["role"] == "system"


def _joined(*messages: dict[str, Any]) -> str:
    return GLUE.join(filter(None, (message.get("content") for message in messages)))
