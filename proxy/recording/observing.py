"""Keeps what a request shows of its agent's surroundings: results, cut, and how the reply's calls fit their tools.

It costs slices of the new messages and one schema check per call of the reply, because it is done before the commit.
Left out: what it means (proxy/pool/behaviour).
"""

from collections.abc import Sequence
from typing import Any

from proxy.call import Call, Reply
from proxy.parsing.formats import Format
from proxy.parsing.schema_check import UNCHECKABLE, misfit
from proxy.pool.behaviour.scripts import scripts
from proxy.pool.completions.observed import MOST_RESULTS, MOST_TEXT, UNKNOWN_TOOL, Observed, ToolResult, cut

FAULT = 200
"""Characters that are kept of a fault, of a broken call, and of an id or a name."""


def observed(call: Call, reply: Reply, form: Format) -> Observed | None:
    """Return what is kept of a request and its reply; None for text completions, which have no messages."""
    if call.prompt is not None:
        return None
    new = _behind_last_turn(call.messages)
    seen = {script for message in new for script in scripts(message.get("content") or "")}
    return Observed(
        results=_results(new) if len(new) < len(call.messages) else (),
        faults=_faults(call, reply),
        broken=_broken(reply.content, form.openers) if call.tools and not call.no_calls else "",
        scripts=tuple(sorted(seen)),
    )


def _behind_last_turn(messages: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """The messages behind the last assistant turn; all of them where there is none."""
    start = len(messages)
    while start and messages[start - 1]["role"] != "assistant":
        start -= 1
    return messages[start:]


def _results(messages: Sequence[dict[str, Any]]) -> tuple[ToolResult, ...]:
    answers = [message for message in messages if message["role"] == "tool"]
    spoken = not answers
    answers = answers or [message for message in messages if message["role"] == "user"]
    results, room = [], MOST_TEXT
    for message in answers[:MOST_RESULTS]:
        text = message.get("content") or ""
        head, tail = cut(text, room)
        room -= len(head) + len(tail)
        results.append(
            ToolResult(
                (message.get("tool_call_id") or "")[:FAULT],
                (message.get("name") or "")[:FAULT],
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
