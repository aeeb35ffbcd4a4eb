"""Writes branches for readers of conversations: chat JSONL for trainers, session traces for the Hub's viewer."""

from typing import Any

import msgspec

from proxy.pool.traces.branches import PromptBranch
from proxy.pool.traces.origin import of_branch
from proxy.pool.traces.times import known_times

HARNESS = "blackforge"


def chat_line(branch: PromptBranch) -> bytes:
    """Return a branch as one line of chat JSONL: OpenAI messages, tools as JSON text, and where it comes from.

    `datasets` gives a column one type. Schemas of tools have none in common, so trl takes them as text.
    """
    turns = branch.turns
    own = of_branch(branch) | {
        "copied": [at for at, turn in enumerate(turns) if turn.copied],
        "raw": [at for at, turn in enumerate(turns) if turn.raw],
    }
    reward_parts = own.pop("reward_parts")
    own["reward_parts"] = None if reward_parts is None else msgspec.json.encode(reward_parts).decode()
    tools = {"tools": msgspec.json.encode(branch.tools).decode()} if branch.tools else {}
    return msgspec.json.encode({"messages": [turn.message for turn in turns]} | tools | {HARNESS: own}) + b"\n"


def session_trace(branch: PromptBranch) -> bytes:
    """Return a branch as a file in the Hub's Session Trace Simple Format: a header, then one message a line."""
    rollout = branch.rollout
    header: dict[str, Any] = {
        "type": "session",
        "harness": HARNESS,
        "id": branch.name,
        "name": f"{rollout.task}, member {rollout.member}, {branch.label or 'call'}",
    }
    lines = [header | {HARNESS: of_branch(branch)}]
    for turn in branch.turns:
        message = _traced(turn.message)
        item = turn.completion
        if item is not None:
            started_at, _ = known_times(item)
            if started_at is not None:
                message["timestamp"] = round(started_at * 1000)
            versions = {span.version for span in item.versions}
            if len(versions) == 1:
                message["model"] = versions.pop()
        marks = {name: True for name, is_so in (("copied", turn.copied), ("raw", turn.raw)) if is_so}
        lines.append({"type": "message", "message": message} | marks)
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


def _traced(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with the format's own names."""
    traced: dict[str, Any] = {"role": message["role"], "content": message.get("content") or ""}
    if message.get("reasoning_content"):
        traced["reasoningContent"] = message["reasoning_content"]
    if message.get("tool_calls"):
        traced["toolCalls"] = [
            {
                "id": str(call.get("id") or ""),
                "function": {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            }
            for call in message["tool_calls"]
        ]
    if message.get("tool_call_id"):
        traced["toolCallId"] = message["tool_call_id"]
    return traced
