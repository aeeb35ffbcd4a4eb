"""Keeps what a request shows of its agent's surroundings: results, cut, and how the reply's calls fit their tools.

It costs slices of the new messages and one schema check per call of the reply, because it is done before the commit. A
reply in another script than the task's is looked up in all results of the request.
Left out: what it means (proxy/pool/behaviour).
"""

from collections.abc import Sequence
from typing import Any

from proxy.augment.prompt_view import PromptView
from proxy.call import Call, Reply
from proxy.parsing.formats import Format
from proxy.parsing.schema_check import UNCHECKABLE, misfit
from proxy.pool.behaviour.actions import written_commands
from proxy.pool.behaviour.scripts import present, scripts, usual, words
from proxy.pool.completions.observed import (
    FOREIGN,
    MOST_RESULTS,
    MOST_TEXT,
    UNKNOWN_TOOL,
    Observed,
    ToolResult,
    cut,
)

FAULT = 200
"""Characters that are kept of a fault, of a broken call, and of an id or a name."""
MOST_QUOTED = 200
"""Words of a reply that are looked up in the results."""


def observed(call: Call, reply: Reply, form: Format, view: PromptView) -> Observed | None:
    """Return what is kept of a request and its reply; None for text completions, which have no messages.

    `view`: that of the attempt, which both have passed through.
    """
    if call.prompt is not None:
        return None
    new = _behind_last_turn(call.messages)
    asked, _ = _asked_and_shown(call.messages[max(0, len(call.messages) - len(new) - 1) :])
    return Observed(
        results=_results(new, view) if len(new) < len(call.messages) else (),
        faults=_faults(call, reply),
        broken=_broken(reply.content, form.openers) if call.tools and not call.no_calls else "",
        scripts=tuple(sorted({script for text in asked for script in scripts(text)})),
        foreign=_foreign(call.messages, f"{reply.reasoning}\n{reply.content}"),
        told=view.words(reply),
    )


def _asked_and_shown(messages: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """The foreign texts of system and user, and those of results: a user's answer to a written command is one."""
    asked, shown = list[str](), list[str]()
    before: dict[str, Any] = {}
    for message in messages:
        text = message.get("content") or ""
        if message["role"] == "assistant":
            before = message
        elif not text.isascii():
            commanded = before.get("content") and not before.get("tool_calls") and written_commands(before["content"])
            (shown if message["role"] == "tool" or commanded else asked).append(text)
    return asked, shown


def _foreign(messages: Sequence[dict[str, Any]], text: str) -> tuple[tuple[str, str], ...]:
    """The scripts of a reply that nobody who asked writes, each with its first words that stand in no result."""
    written = set(present(text))
    if not written:
        return ()
    asked, shown = _asked_and_shown(messages)
    foreign = sorted(written - usual({script for text in asked for script in scripts(text)}))
    results = "\n".join(shown) if foreign else ""
    first = [(script, _first_words(words(text, script), results)) for script in foreign]
    return tuple((script, some) for script, some in first if some)


def _first_words(some: Sequence[str], results: str) -> str:
    """The first of these words that do not stand in the results. A reply that quotes many is not read to its end."""
    own = ""
    for word in list(dict.fromkeys(some))[:MOST_QUOTED]:
        if len(own) < FOREIGN and word not in results:
            own = f"{own} {word}".strip()
    return own[:FOREIGN]


def _behind_last_turn(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The messages behind the last assistant turn; all of them where there is none."""
    start = len(messages)
    while start and messages[start - 1]["role"] != "assistant":
        start -= 1
    return messages[start:]


def _results(messages: Sequence[dict[str, Any]], view: PromptView) -> tuple[ToolResult, ...]:
    answers = [message for message in messages if message["role"] == "tool"]
    spoken = not answers
    answers = answers or [message for message in messages if message["role"] == "user"]
    results, room = [], MOST_TEXT
    for message in answers[:MOST_RESULTS]:
        name, text = view.result(message)
        head, tail = cut(text, room)
        room -= len(head) + len(tail)
        results.append(
            ToolResult(
                (message.get("tool_call_id") or "")[:FAULT],
                name[:FAULT],
                head,
                tail,
                len(text),
                bool(message.get("is_error")),
                spoken,
            )
        )
    return tuple(results)


def _faults(call: Call, reply: Reply) -> tuple[str, ...]:
    """How each call of the reply misses its tool; none where all fit."""
    if not reply.tool_calls:
        return ()
    offered = {tool["function"]["name"]: tool["function"].get("parameters") for tool in call.tools}
    faults = []
    for item in reply.tool_calls:
        if item.name not in offered:
            faults.append(UNKNOWN_TOOL)
            continue
        fault = misfit(item.arguments or "{}", offered[item.name] or {})
        faults.append("" if fault.startswith(UNCHECKABLE) else fault.replace("the answer", "the call", 1)[:FAULT])
    return tuple(faults) if any(faults) else ()


def _broken(text: str, openers: Sequence[str]) -> str:
    """The beginning of a call that stayed text. A marker in prose or in a code span opens none."""
    for opener in openers:
        at = text.find(opener)
        behind = text[at + len(opener) : at + FAULT].lstrip() if at >= 0 else ""
        if behind[:1] in ("{", "[", "<") or (behind and opener.endswith("=")):
            return text[at : at + FAULT]
    return ""
