"""The recorded sessions: agent after agent, run after run, the model calls of each in the order of their arrival.

Reads the scrubbed files of `data/` and, given their folder, unscrubbed recordings of the same form. Left out: requests
that are no model calls.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.dialects import anthropic, chat_completions, responses
from proxy.dialects.base import Dialect
from tests.captures.replies import reply_of

DATA = Path(__file__).parent / "data"
TRUTH = {"main": "main", "sub": "subagent", "side": "side", "compaction": "compaction"}
"""Kind -> label; calls that failed on purpose have none."""
DIALECTS: dict[str, Dialect] = {"chat": chat_completions, "responses": responses, "anthropic": anthropic}
"""The API of an exchange -> what reads its requests."""
HEADERS_OF_ITS_CONNECTION = {"host", "connection", "content-length", "accept-encoding", "authorization", "x-api-key"}


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One model call and what was answered."""

    agent: str
    run: str
    seq: int
    """Its place in the session, with gaps."""
    kind: str
    """The truth: main | sub (of a sub-agent) | side (title and the like) | compaction | fault (failed on purpose)."""
    api: str
    """chat | responses | anthropic."""
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    started: float
    """Seconds since the session's start, and when its answer had been sent."""
    ended: float
    status: int | None
    """None where the connection was reset instead of answered."""
    stream: bool
    cut: bool
    """The answer broke off."""
    gone: bool
    """The client did not wait for its end."""
    reply: dict[str, Any] | None
    """As `replies.reply_of` says."""


@dataclass(frozen=True)
class Session:
    """One start of an agent."""

    agent: str
    run: str
    exchanges: tuple[Exchange, ...]

    @property
    def name(self) -> str:
        return f"{self.agent}-{self.run}"


def sessions(folder: Path = DATA) -> list[Session]:
    """All recorded sessions, by agent and run."""
    by_run: dict[tuple[str, str], list[Exchange]] = {}
    for file in sorted(folder.glob("*.jsonl.gz")):
        for row in rows(file):
            exchange = _exchange(row)
            by_run.setdefault((exchange.agent, exchange.run), []).append(exchange)
    return [Session(*name, tuple(sorted(of, key=lambda each: each.seq))) for name, of in sorted(by_run.items())]


def rows(file: Path) -> Iterator[dict[str, Any]]:
    """The model calls of a file as they were recorded, each answer also as `reply`."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            if row.get("kind"):
                answer = row["resp"]
                reply = answer["reply"] if "reply" in answer else reply_of(row["api"], answer)
                yield {**row, "resp": {**answer, "reply": reply}}


def full_name(call: dict[str, Any]) -> str:
    """The name of a recorded tool call, with its name space where it has one."""
    return f"{call['namespace']}__{call['name']}" if call.get("namespace") else str(call["name"])


def _exchange(row: dict[str, Any]) -> Exchange:
    answer = row["resp"]
    return Exchange(
        **{name: row[name] for name in ("agent", "run", "seq", "kind", "api", "path", "body")},
        headers={name: value for name, value in row["headers"] if name.lower() not in HEADERS_OF_ITS_CONNECTION},
        started=row["t"],
        ended=row["t_end"],
        status=answer.get("status"),
        stream=bool(answer.get("stream")),
        cut="cut_after_events" in answer,
        gone="client_gone" in answer,
        reply=answer["reply"],
    )
