"""Sends recorded rollouts as OpenTelemetry spans to an OTLP/HTTP endpoint. Needs blackforge[otel].

A trace is an attempt: one `invoke_agent` span, and below it a `chat` span for each model call, by the conventions for
generative AI (semantic-conventions-genai, in development). Ids follow from the attempt, so a receiver that compares ids
replaces an attempt that is sent again. Left out: spans of tools, whose times nobody has measured, and the model's name,
which no pool has; `gen_ai.response.model` is the weight version.
"""

import hashlib
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice
from typing import Any

import msgspec

from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.read.pages import RolloutFilter
from proxy.pool.read.records import CompletionRecord, RolloutRecord
from proxy.pool.traces.arguments import decoded_arguments
from proxy.pool.traces.branches import BranchTurn, PromptBranch, PromptReader
from proxy.pool.traces.files import TraceCounts, recorded_branches
from proxy.pool.traces.origin import of_rollout
from proxy.pool.traces.times import known_times
from proxy.pool.untrained import UntrainedReason

AT_ONCE = 64
"""Spans of one request. Their prompts are in them, so a request stays below the 64 MiB that receivers take."""
PROVIDER = "blackforge"
FAILED = ("abort", "error")


def send_spans(
    pool: Pool, which: RolloutFilter, endpoint: str, reader: PromptReader, tokenizer: str | None
) -> TraceCounts:
    """Send the rollouts that pass. UserError when the endpoint does not take them, or a library is missing."""
    counts = TraceCounts()
    try:
        exporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter(endpoint)
        import_module("opentelemetry.sdk.trace")  # both are large, and needed here only
    except ModuleNotFoundError as error:
        raise UserError(f"spans need {error.name}; install blackforge[otel]") from error
    try:
        for branches in recorded_branches(pool, which, reader, tokenizer, counts):
            spans = _spans(branches)
            while some := list(islice(spans, AT_ONCE)):
                if exporter.export(some).name != "SUCCESS":
                    raise UserError(
                        f"{endpoint} did not take the spans of attempt {branches[0].rollout.attempt}; "
                        f"{counts.rollouts - 1} rollouts before it were sent; see the log lines above"
                    )
    finally:
        exporter.shutdown()
    return counts


def _spans(branches: Sequence[PromptBranch]) -> Iterator[Any]:
    """Yield the spans of an attempt as the SDK's own records."""
    rollout = branches[0].rollout
    calls = sorted(_calls(branches), key=lambda call: call[1].ordinal)
    trace, root = _identity(rollout.run, rollout.attempt, rollout.dated_at)
    start, end = _whole_time(rollout, [item for _, item, _ in calls])
    whole = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": rollout.agent,
        "gen_ai.usage.input_tokens": sum(item.prompt_length for _, item, _ in calls),
        "gen_ai.usage.output_tokens": sum(len(item.tokens) - item.prompt_length for _, item, _ in calls),
    }
    score = {"gen_ai.evaluation.name": "reward", "gen_ai.evaluation.score.value": rollout.reward}
    yield _span(
        f"invoke_agent {rollout.agent or ''}".strip(),
        trace,
        root,
        None,
        (start, end),
        whole | _common(rollout.attempt) | _ours(of_rollout(rollout)),
        error=rollout.failure,
        event=None if rollout.reward is None else ("gen_ai.evaluation.result", end, score),
    )
    for branch, item, turns in calls:
        _, own = _identity(rollout.run, rollout.attempt, rollout.dated_at, item.id)
        error = item.finish_reason if item.finish_reason in FAILED else None
        yield _span("chat", trace, own, root, known_times(item), call_attributes(branch, item, turns), error)


def _whole_time(rollout: RolloutRecord, calls: Sequence[CompletionRecord]) -> tuple[float | None, float | None]:
    """Return when an attempt began and ended. An imported one was closed by the import, so its calls have to say it."""
    begins, ends = zip(*map(known_times, calls), strict=True)
    imported = any(call.untrainable and call.untrainable.reason == UntrainedReason.IMPORTED for call in calls)
    last = None if None in ends else max(ends)
    return None if None in begins else min(begins), last if imported else rollout.closed_at or last


def _calls(branches: Sequence[PromptBranch]) -> Iterator[tuple[PromptBranch, CompletionRecord, Sequence[BranchTurn]]]:
    """Yield each call with its branch and the messages that its prompt has beyond the answer before it."""
    for branch in branches:
        after = 0
        for at, turn in enumerate(branch.turns):
            if turn.completion is not None:
                if not turn.copied:
                    yield branch, turn.completion, branch.turns[after:at]
                after = at + 1


def call_attributes(branch: PromptBranch, item: CompletionRecord, turns: Sequence[BranchTurn]) -> dict[str, Any]:
    """Return the attributes of a call. Of its prompt they hold only the messages behind the answer that it follows."""
    versions = {span.version for span in item.versions}
    first = not any(turn.completion is not None for turn in branch.turns[: _place(branch, item)])
    system = [part for turn in turns if turn.message["role"] == "system" for part in _parts(turn.message)]
    inputs = [_message(turn.message) for turn in turns if turn.message["role"] != "system"]
    outputs = [_message(item.message) | {"finish_reason": item.finish_reason}]
    return (
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.response.id": f"completion-{item.id}",
            "gen_ai.response.model": versions.pop() if len(versions) == 1 else None,
            "gen_ai.response.finish_reasons": [item.finish_reason],
            "gen_ai.usage.input_tokens": item.prompt_length,
            "gen_ai.usage.output_tokens": len(item.tokens) - item.prompt_length,
            "gen_ai.system_instructions": _text(system) if system else None,
            "gen_ai.input.messages": _text(inputs) if inputs else None,
            "gen_ai.output.messages": _text(outputs),
            "gen_ai.tool.definitions": _text(branch.tools) if branch.tools and first else None,
        }
        | _common(branch.rollout.attempt)
        | _ours({"raw": any(turn.raw for turn in turns) or None})
        | _ours({"label": item.label, "branch": branch.number, "forked_from": branch.forked_from})
        | _ours({"follows": item.follows, "untrained": None if item.untrained is None else str(item.untrained)})
    )


def _place(branch: PromptBranch, item: CompletionRecord) -> int:
    return next(at for at, turn in enumerate(branch.turns) if turn.completion is item)


def _common(attempt: int | None) -> dict[str, Any]:
    return {"gen_ai.provider.name": PROVIDER, "gen_ai.conversation.id": f"attempt-{attempt}"}


def _ours(values: dict[str, Any]) -> dict[str, Any]:
    """Return values under our own prefix; objects as JSON text, as attributes hold none."""
    return {f"blackforge.{name}": _text(each) if isinstance(each, dict) else each for name, each in values.items()}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message in the form of the conventions."""
    if message["role"] == "tool":
        answered = {"type": "tool_call_response", "id": message.get("tool_call_id"), "response": message["content"]}
        return {"role": "tool", "parts": [answered]}
    return {"role": message["role"], "parts": _parts(message)}


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    parts = []
    if message.get("reasoning_content"):
        parts.append({"type": "reasoning", "content": message["reasoning_content"]})
    if message.get("content"):
        parts.append({"type": "text", "content": message["content"]})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        parts.append(
            {
                "type": "tool_call",
                "id": call.get("id"),
                "name": function["name"],
                "arguments": decoded_arguments(function["arguments"]),
            }
        )
    return parts


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _identity(*parts: Any) -> tuple[int, int]:
    """Return the ids of a trace and a span, the same ones each time."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])


def _span(
    name: str,
    trace_id: int,
    span_id: int,
    parent: int | None,
    times: tuple[float | None, float | None],
    attributes: dict[str, Any],
    error: str | None = None,
    event: tuple[str, float | None, dict[str, Any]] | None = None,
) -> Any:
    """Return a span that has ended. Attributes without a value are left out; times that are not known are 0 or none."""
    api, sdk = import_module("opentelemetry.trace"), import_module("opentelemetry.sdk.trace")
    resources = import_module("opentelemetry.sdk.resources")
    known = {key: value for key, value in attributes.items() if value is not None}
    kind = api.SpanKind.INTERNAL if parent is None else api.SpanKind.CLIENT
    flags = api.TraceFlags(api.TraceFlags.SAMPLED)
    context, above = (
        None if id is None else api.SpanContext(trace_id, id, is_remote=False, trace_flags=flags)
        for id in (span_id, parent)
    )
    return sdk.ReadableSpan(
        name=name,
        context=context,
        parent=above,
        kind=kind,
        resource=resources.Resource.create({"service.name": "blackforge"}),
        instrumentation_scope=import_module("opentelemetry.sdk.util.instrumentation").InstrumentationScope(
            "blackforge"
        ),
        attributes=known | ({"error.type": error} if error else {}),
        events=[sdk.Event(event[0], event[2], _nanoseconds(event[1]) or 0)] if event else [],
        status=api.Status(api.StatusCode.ERROR, error) if error else api.Status(),
        start_time=_nanoseconds(times[0]),
        end_time=_nanoseconds(times[1]),
    )


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e9)
