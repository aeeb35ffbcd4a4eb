"""Labels against the truth of recorded sessions: what each call of a real agent was for."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from proxy.dialects.base import tool_call
from proxy.pool.completions.labels import labels
from proxy.pool.completions.records import RequestShape
from proxy.prompt.continuation.request_shape import RequestShapes
from tests.captures.recorded import DIALECTS, TRUTH, Exchange, Session, sessions

SESSIONS = sessions()
AGENTS = sorted({session.agent for session in SESSIONS})


@dataclass(frozen=True)
class Row:
    """A call as the gateway would have recorded it, and the truth."""

    id: int
    finish_reason: str
    shape: RequestShape
    reply: dict[str, Any]
    kind: str


def recorded(session: Session) -> list[Row]:
    """The rows of a session: shapes are taken when requests arrive, rows are committed when answers end."""
    shapes = RequestShapes()
    rows: list[Row] = []
    arrived: dict[int, RequestShape] = {}
    moments = [(each.started, i, each, False) for i, each in enumerate(session.exchanges)]
    moments += [(each.ended, i, each, True) for i, each in enumerate(session.exchanges)]
    for _, i, exchange, over in sorted(moments, key=lambda moment: (moment[0], moment[1], moment[3])):
        if not over:
            body = msgspec.json.encode(exchange.body)
            arrived[i] = shapes.of(DIALECTS[exchange.api].read(body, exchange.path), None)
        elif exchange.reply is not None:
            rows.append(Row(len(rows) + 1, _finish(exchange), arrived[i], _message(exchange.reply), exchange.kind))
            shapes.add(rows[-1].id, rows[-1])
    return rows


def _finish(exchange: Exchange) -> str:
    if exchange.cut or exchange.reply is None:
        return "abort"
    return "tool_calls" if exchange.reply["calls"] else "stop"


def _message(reply: dict[str, Any]) -> dict[str, Any]:
    calls = [tool_call(call["id"], _name(call), call["arguments"]) for call in reply["calls"]]
    return {"role": "assistant", "content": reply["content"] or None} | ({"tool_calls": calls} if calls else {})


def _name(call: dict[str, Any]) -> str:
    return f"{call['namespace']}__{call['name']}" if call.get("namespace") else str(call["name"])


@pytest.mark.parametrize("agent", AGENTS)
def test_every_recorded_call_has_its_label(agent: str) -> None:
    wrong: list[str] = []
    seen: Counter[str] = Counter()
    for session in SESSIONS:
        if session.agent == agent:
            rows = recorded(session)
            label_of = labels(rows)
            judged = [row for row in rows if row.kind in TRUTH]  # the others failed on purpose
            seen.update(TRUTH[row.kind] for row in judged)
            wrong += [f"{session.name} {row.id}" for row in judged if label_of[row.id] != TRUTH[row.kind]]
    assert wrong == []
    assert seen["main"] >= 50 and (seen["side"] >= 20 if agent == "opencode" else not seen["side"])
    assert agent == "mini" or (seen["subagent"] >= 6 and seen["compaction"] >= 2)
