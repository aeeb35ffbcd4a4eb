"""Writes a branch as an ATIF document: each recorded answer with token ids and logprobs, copies marked."""

import json
import math
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from proxy.pool.read.records import CompletionRecord
from proxy.pool.traces.arguments import decoded_arguments
from proxy.pool.traces.atif_format import (
    OURS,
    VERSION,
    AtifAgent,
    AtifCall,
    AtifDocument,
    AtifMetrics,
    AtifObservation,
    AtifResult,
    AtifStep,
    AtifTotals,
)
from proxy.pool.traces.branches import BranchTurn, PromptBranch
from proxy.pool.traces.origin import of_branch
from proxy.pool.traces.times import known_times

UNKNOWN = "unknown"
"""Stands where the format demands a text and the pool has none: the agent's name and version."""


def atif_document(branch: PromptBranch, tokenizer: str | None) -> bytes:
    """Return a branch as a JSON document. `tokenizer`: the fingerprint of the one whose ids these are."""
    steps = [
        msgspec.Raw(msgspec.json.encode(_step(number, turn, results)))
        for number, (turn, results) in enumerate(_with_results(branch.turns), 1)
    ]
    own = branch.own
    document = AtifDocument(
        schema_version=VERSION,
        session_id=f"{branch.rollout.run}-attempt-{branch.rollout.attempt:06}",
        trajectory_id=branch.name,
        agent=AtifAgent(name=branch.rollout.agent or UNKNOWN, version=UNKNOWN, tool_definitions=branch.tools or None),
        steps=steps,
        final_metrics=AtifTotals(
            total_prompt_tokens=sum(item.prompt_length for item in own),
            total_completion_tokens=sum(len(item.tokens) - item.prompt_length for item in own),
            total_steps=len(steps),
        ),
        extra={OURS: of_branch(branch) | {"tokenizer": tokenizer}},
    )
    return msgspec.json.encode(document)


def _with_results(turns: Sequence[BranchTurn]) -> Iterator[tuple[BranchTurn, list[dict[str, Any]]]]:
    """Yield turns, each answer with the results behind it, and results that follow no answer as one turn."""
    at = 0
    while at < len(turns):
        turn, end = turns[at], at + 1
        if turn.message["role"] in ("assistant", "tool"):
            while end < len(turns) and turns[end].message["role"] == "tool":
                end += 1
        yield turn, [each.message for each in turns[at:end] if each.message["role"] == "tool"]
        at = end


def _step(number: int, turn: BranchTurn, results: Sequence[dict[str, Any]]) -> AtifStep:
    message, item = turn.message, None if turn.copied else turn.completion
    own: dict[str, Any] = {"role": "tool"} if message["role"] == "tool" else {}  # results that follow no answer
    if turn.raw:
        own["raw"] = True
    if turn.completion is not None:
        own["completion"] = turn.completion.id
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    step = AtifStep(
        step_id=number,
        source={"assistant": "agent", "user": "user"}.get(message["role"], "system"),  # type: ignore[arg-type]
        message="" if message["role"] == "tool" else message.get("content") or "",
        reasoning_content=message.get("reasoning_content") or None,
        tool_calls=calls or None,
        observation=_observation(results, {call.tool_call_id for call in calls}) if results else None,
        is_copied_context=turn.copied or None,
        extra={OURS: own} if own else None,
    )
    if item is None:
        return step
    versions = {span.version for span in item.versions}
    started_at, _ = known_times(item)
    return msgspec.structs.replace(
        step,
        timestamp=None if started_at is None else datetime.fromtimestamp(started_at, UTC).isoformat(),
        model_name=versions.pop() if len(versions) == 1 else None,
        metrics=_metrics(item),
        llm_call_count=1,
    )


def _call(call: dict[str, Any]) -> AtifCall:
    """Return a call. Arguments that decoding would change are kept as text, too."""
    text = call["function"].get("arguments") or ""
    value = decoded_arguments(text)
    arguments = value if isinstance(value, dict) else {}
    changed = not isinstance(value, dict) or json.dumps(arguments, ensure_ascii=False) != text
    return AtifCall(
        tool_call_id=str(call.get("id") or ""),
        function_name=str(call["function"]["name"]),
        arguments=arguments,
        extra={OURS: {"arguments": text}} if changed else None,
    )


def _observation(results: Sequence[dict[str, Any]], known: set[str]) -> AtifObservation:
    """Return results. One whose call is not in the step names it in `extra`, as the format demands."""
    written = []
    for result in results:
        id = result.get("tool_call_id")
        other = {OURS: {"call": id}} if id is not None and id not in known else None
        written.append(AtifResult(source_call_id=id if id in known else None, content=result["content"], extra=other))
    return AtifObservation(results=written)


def _metrics(item: CompletionRecord) -> AtifMetrics:
    answer = item.tokens[item.prompt_length :]
    own: dict[str, Any] = {
        "finish_reason": item.finish_reason,
        "label": item.label,
        "versions": msgspec.to_builtins(item.versions),
    }
    started_at, finished_at = known_times(item)
    if started_at is not None and finished_at is not None:
        own["seconds"] = finished_at - started_at
    if item.untrained is not None:
        own["untrained"] = str(item.untrained)
    logprobs = _logprobs(item)
    whole = bool(logprobs) and None not in logprobs
    if not whole and len(item.logprobs):
        own["logprobs"] = logprobs  # the format knows no token without one
    if item.given:
        own["given"] = [[start - item.prompt_length, end - item.prompt_length] for start, end in item.given]
    return AtifMetrics(
        prompt_tokens=item.prompt_length,
        completion_tokens=len(answer),
        prompt_token_ids=item.tokens[: item.prompt_length].tolist(),
        completion_token_ids=answer.tolist(),
        logprobs=[value for value in logprobs if value is not None] if whole else None,
        extra={OURS: own},
    )


def _logprobs(item: CompletionRecord) -> list[float | None]:
    """Return one for each token of the answer: None where the proxy wrote it, and where it is missing or not finite."""
    values: list[float | None] = [None] * (len(item.tokens) - item.prompt_length)
    for place, value in zip(item.sampled_places(), item.logprobs, strict=False):
        values[place - item.prompt_length] = value if math.isfinite(value) else None
    return values
