"""A written case as the gateway and the harness would have kept it: recorded completions, and the sandbox' evidence."""

import json
from dataclasses import dataclass
from typing import Any

from harness.environment.file_manifest import FileDifference
from harness.integrity.evidence import Evidence, evidence_of
from harness.tasks import Task, Verifier
from harness.verdict.findings import IsolationFindings
from proxy.augment.prompt_view import PromptView
from proxy.call import Reply, ToolCall
from proxy.dialects.chat_completions import read
from proxy.parsing.formats import FORMATS
from proxy.pool.completions.observed import Observed, pack, unpack
from proxy.pool.completions.records import RequestShape
from proxy.recording.observing import observed

FORM = FORMATS["qwen"]()
WORK = "/app"


@dataclass(frozen=True)
class Row:
    """A completion, as far as events and detectors look at it."""

    id: int
    ordinal: int
    follows: int | None
    finish_reason: str
    reply: dict[str, Any]
    observed: Observed | None
    shape: RequestShape | None = None
    label: str | None = "main"


def recorded(messages: list[dict[str, Any]]) -> list[Row]:
    """The rows of a conversation: each assistant message is the answer to a request with the messages before it."""
    rows: list[Row] = []
    names = sorted({call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()})
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in names]
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        body = {"model": "m", "messages": messages[:place], **({"tools": tools} if tools else {})}
        calls = tuple(
            ToolCall(call["id"], call["function"]["name"], _written(call["function"]["arguments"]))
            for call in message.get("tool_calls") or ()
        )
        reply = Reply(
            content=message.get("content") or "", reasoning=message.get("reasoning_content") or "", tool_calls=calls,
            finish_reason="tool_calls" if calls else "stop", stop_sequence=None, prompt_tokens=1, sampled_tokens=1,
            cached_tokens=0,
        )  # fmt: skip
        kept = observed(read(json.dumps(body).encode(), "/v1/chat/completions"), reply, FORM, PromptView(None))
        row = len(rows) + 1
        shown = None if kept is None else unpack(pack(kept))
        rows.append(Row(row, row - 1, row - 1 or None, reply.finish_reason, reply.message(), shown))
    return rows


def _written(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def evidence(case: dict[str, Any]) -> Evidence:
    """The evidence that the harness would make of a case's files."""
    task, files = case["task"], case["task"].get("files") or {}
    verifier = task.get("verifier") or {}
    judging = Verifier(command=verifier) if isinstance(verifier, str) else Verifier(command="", files=_safe(verifier))
    ours = Task(id=case["id"], instruction=task["prompt"], files=_safe(files), verifier=judging)
    known = {_absolute(path) for path in files}
    diff = {_absolute(path): text for path, text in case["diff"].items()}
    difference = FileDifference(
        added=sorted(path for path, text in diff.items() if text is not None and path not in known),
        changed=sorted(path for path, text in diff.items() if text is not None and path in known),
        removed=sorted(path for path, text in diff.items() if text is None),
    )
    texts = {path: text for path, text in diff.items() if text is not None}
    return evidence_of(ours, WORK, IsolationFindings(difference, [], [], []), texts)


def _absolute(path: str) -> str:
    return path if path.startswith(("/", "~")) else f"{WORK}/{path.removeprefix('./')}"


def _safe(files: dict[str, str]) -> dict[str, str]:
    """Without the tests' own working directory, which a task's files have no need to name."""
    return {path.removeprefix(f"{WORK}/"): text for path, text in files.items()}
