"""Events of recorded sessions of real agents, against what a reader of the recordings finds in them.

The texts are replaced by pseudo-words, so exit codes and error texts are not in them; tests/pool/behaviour has those.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.augment.prompt_view import PromptView
from proxy.call import Call, Reply, ToolCall
from proxy.parsing.formats import FORMATS
from proxy.pool.behaviour.actions import actions
from proxy.pool.behaviour.read import events
from proxy.pool.completions.labels import labels
from proxy.pool.completions.observed import HEAD, TAIL, Observed, pack
from proxy.pool.completions.records import RequestShape
from proxy.prompt.continuation.request_shape import RequestShapes
from proxy.recording.observing import observed
from tests.captures.recorded import DIALECTS, Exchange, Session, full_name, sessions

FORM = FORMATS["qwen"]()
SEEN = {
    ("codex-ctxlen", 3): "repeated_call exec_command",
    ("codex-echo", 4): "malformed_call exec_command",
    ("codex-echo", 5): "unknown_tool no_such_tool",
    ("codex-parallel", 2): "parallel_calls 3",
    ("codex-subagent", 2): "parallel_calls 2",
    ("mini-ctxlen", 3): "repeated_call bash",
    ("mini-echo", 4): "malformed_call bash",
    ("mini-echo", 5): "unknown_tool no_such_tool",
    ("mini-parallel", 2): "parallel_calls 3",
    ("opencode-ctxlen", 4): "repeated_call bash",
    ("opencode-ctxlen", 8): "repeated_call bash",
    ("opencode-ctxlen", 9): "repeated_call bash",
    ("opencode-ctxlen", 10): "repeated_call bash",
    ("opencode-echo", 5): "malformed_call bash",
    ("opencode-echo", 6): "unknown_tool no_such_tool",
    ("opencode-parallel", 3): "parallel_calls 3",
    ("opencode-subagent", 3): "parallel_calls 2",
    ("qwen-echo", 4): "malformed_call run_shell_command",
    ("qwen-echo", 5): "unknown_tool no_such_tool",
    ("qwen-parallel", 2): "parallel_calls 3",
    ("qwen-subagent", 2): "parallel_calls 2, malformed_call agent, malformed_call agent",
} | {("mini-longrun", seq): "repeated_call bash" for seq in range(3, 22)}
"""(session, call) -> its events besides the calls themselves. The names of sub-agents are pseudo-words, so no choice of
the schema of qwen-code fits them."""
NOT_SHOWN = {
    "codex-ctxlen": [3],
    "opencode-compact_ctx": [4, 7],
    "opencode-ctxlen": [4],
    "opencode-echo": [5, 6],
    "qwen-ctxlen": [6],
    "qwen-echo": [4],
    "mini-echo": [4, 5, 6],
}
"""Calls whose results no request shows to the conversation: the run ended or its history was compacted, or the agent
put another turn into the place of the reply. mini ends each run with a call."""


def test_events_are_those_that_a_reader_finds() -> None:
    called: Counter[tuple[str, str]] = Counter()
    seen: dict[tuple[str, int], str] = {}
    missing: dict[str, list[int]] = {}
    for session in sessions():
        chain = rows(session)
        for event in events(chain):
            if event.kind == "tool_called":
                called[session.agent, event.name.partition(":")[0]] += 1
                continue
            key, what = (session.name, event.completion), f"{event.kind} {event.name.partition(':')[0]}"
            seen[key] = f"{seen[key]}, {what}" if key in seen else what
        done = actions([each for each in chain if each.label != "side"])
        lacking = [id for id, some in done.items() if any(action.result is None for action in some)]
        if lacking and (session.agent != "mini" or session.name in NOT_SHOWN):
            missing[session.name] = lacking
        kept = [each.observed for each in chain if each.observed is not None]
        assert len(kept) == len(chain) and all(len(pack(each)) < 1000 for each in kept)
        assert all(len(result.head) <= HEAD and len(result.tail) <= TAIL for each in kept for result in each.results)
    assert seen == SEEN
    assert missing == NOT_SHOWN
    told = Counter(
        (session.agent, full_name(call))
        for session in sessions()
        for exchange in session.exchanges
        if exchange.reply is not None and not exchange.cut and not exchange.gone and exchange.kind != "side"
        for call in exchange.reply["calls"]
    )
    assert called == told and sum(told.values()) > 250


@dataclass
class Row:
    """A call as the gateway would have recorded it."""

    id: int
    seq: int
    finish_reason: str
    reply: dict[str, Any]
    shape: RequestShape
    observed: Observed | None
    label: str | None = None
    follows: int | None = None


def rows(session: Session) -> list[Row]:
    """The rows of a session, as if each call had been answered before the next one came."""
    shapes, kept = RequestShapes(), list[Row]()
    for exchange in session.exchanges:
        if exchange.reply is not None and not exchange.cut and not exchange.gone:
            call = DIALECTS[exchange.api].read(msgspec.json.encode(exchange.body), exchange.path)
            kept.append(row(exchange, call, shapes.of(call, None)))
            shapes.add(kept[-1].id, kept[-1])
    for one, label in labels(kept).items():
        next(each for each in kept if each.id == one).label = label
    return kept


def row(exchange: Exchange, call: Call, shape: RequestShape) -> Row:
    assert exchange.reply is not None
    calls = tuple(ToolCall(each["id"], full_name(each), each["arguments"]) for each in exchange.reply["calls"])
    reply = Reply(
        content=exchange.reply["content"], reasoning=exchange.reply["reasoning"], tool_calls=calls,
        finish_reason="tool_calls" if calls else "stop", stop_sequence=None, prompt_tokens=1, sampled_tokens=1,
        cached_tokens=0,
    )  # fmt: skip
    kept = observed(call, reply, FORM, PromptView(None))
    return Row(exchange.seq, exchange.seq, reply.finish_reason, reply.message(), shape, kept)
