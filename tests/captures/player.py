"""Plays recorded sessions through a real gateway: the agent's requests as recorded, the replies written by a model.

The engine samples each recorded reply in the model's own format and in tokens that the tokenizer would not choose, so
that a turn that was tokenised again shows. Later requests name tool calls by the ids that the gateway gave. Requests go
one after the other in the order of their arrival. Left out: the pace, and calls that overlap.
"""

import asyncio
import json
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import aiohttp

from proxy.engine.scripted import Fault, ScriptedReply
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import paths
from proxy.prompt.template import ChatTemplate
from tests.captures.oracle import Continuation, continuations
from tests.captures.recorded import Exchange, Session
from tests.captures.replies import reply_of
from tests.proxy.conftest import Stand


@dataclass(frozen=True)
class Played:
    """How an exchange ended. It has no row if the engine sampled nothing."""

    exchange: Exchange
    status: int | None
    """None where the client went away."""
    delivered: dict[str, Any] | None
    """What the client read, in the form of a recorded reply."""
    row: Completion | None
    path: "array[int]"


def written(reply: dict[str, Any]) -> str:
    """A reply as a model of Qwen's format writes it, its texts and arguments as they were recorded."""
    content, thought = reply["content"], reply["reasoning"]
    text = f"<think>\n{thought}</think>\n\n{content}" if thought else content
    calls = []
    for call in reply["calls"]:
        name = f"{call['namespace']}__{call['name']}" if "namespace" in call else call["name"]
        calls.append(f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {call["arguments"]}}}\n</tool_call>')
    glue = "\n" if content and calls and not content.endswith("\n") else ""
    return text + glue + "\n".join(calls)


class Player:
    """The scripted engine's script, and the agent."""

    def __init__(self, template: ChatTemplate, write: Callable[[dict[str, Any]], str] = written):
        """`write`: a recorded reply as the model writes it."""
        self._template = template
        self._write = write
        self._answer: ScriptedReply | Fault = Fault(status=500)
        self.unusual, self.sampled = 0, 0
        """Replies sampled in other tokens than the tokenizer's, and all."""

    def __call__(self, prompt: str, ids: Sequence[int]) -> ScriptedReply | Fault:
        return self._answer

    async def play(self, session: Session, *stands: Stand) -> list[Played]:
        """Play all exchanges of a session as one attempt, through gateways of one pool that take turns."""
        given: dict[int, dict[str, str]] = {}
        known: set[int] = set()
        results = []
        truths = {truth.exchange.seq: truth for truth in continuations(session.exchanges)}
        for exchange, stand in zip(session.exchanges, cycle(stands), strict=False):
            self._answer = self._planned(exchange)
            ids = _ids_before(truths[exchange.seq], given)
            send = _leave if exchange.gone else _ask
            status, delivered = await send(stand, exchange, _renamed(exchange.body, ids), session.name)
            new = _given(exchange.reply, delivered) if delivered and exchange.reply else {}
            given[exchange.seq] = ids | new
            rows = await _rows(stand, session.name, known, wait=exchange.gone)
            added = [row for row in rows if row.id not in known]
            assert len(added) <= 1, f"{len(added)} rows of one call"
            known |= {row.id for row in added}
            path = paths(rows)[added[0].id] if added else array("i")
            results.append(Played(exchange, status, delivered, added[0] if added else None, path))
        return results

    def _planned(self, exchange: Exchange) -> ScriptedReply | Fault:
        """Return what the engine answers."""
        text = "" if exchange.reply is None else self._write(exchange.reply)
        if exchange.gone:
            return Fault(hang=True)
        if exchange.cut or exchange.status is None:
            return Fault(text=text, after=len(self._template.encode(text)))
        if exchange.status != 200:
            return Fault(status=exchange.status)
        ids = self._unusual(text)
        self.sampled += 1
        self.unusual += list(ids) != self._template.encode(text)
        return ScriptedReply("", ids=ids, tokens_per_event=8)

    def _unusual(self, text: str) -> tuple[int, ...]:
        """Tokens of the text, every second word of it letter by letter."""
        marks = "|".join(map(re.escape, self._template.special))
        ids: list[int] = []
        for i, piece in enumerate(re.findall(rf"{marks}|\w+|\W", text)):
            parts = piece if i % 2 == 0 and piece not in self._template.special else [piece]
            ids += [id for part in parts for id in self._template.encode(part)]
        return tuple(ids)


def _renamed(value: Any, ids: dict[str, str]) -> Any:
    """The body with the ids that this gateway gave to tool calls."""
    if isinstance(value, dict):
        return {name: _renamed(inner, ids) for name, inner in value.items()}
    if isinstance(value, list):
        return [_renamed(inner, ids) for inner in value]
    return ids.get(value, value) if isinstance(value, str) else value


def _ids_before(truth: Continuation, given: dict[int, dict[str, str]]) -> dict[str, str]:
    """Recorded id -> the gateway's. This conversation's ids win, as overlapping calls were recorded with equal ids."""
    anywhere = {was: now for ids in given.values() for was, now in ids.items()}
    return anywhere | (given[truth.follows[-1].seq] if truth.follows else {})


def _given(recorded: dict[str, Any], delivered: dict[str, Any]) -> dict[str, str]:
    """Recorded id -> the gateway's, for the calls that arrived."""
    return {was["id"]: now["id"] for was, now in zip(recorded["calls"], delivered["calls"], strict=False)}


def _posted(stand: Stand, exchange: Exchange, body: Any, key: str) -> Any:
    headers = {**exchange.headers, "Authorization": f"Bearer {key}"}
    return stand.http.post(f"{stand.url}{exchange.path}", data=json.dumps(body).encode(), headers=headers)


async def _ask(stand: Stand, exchange: Exchange, body: Any, key: str) -> tuple[int | None, dict[str, Any] | None]:
    try:
        async with _posted(stand, exchange, body, key) as answer:
            data = (await answer.read()).decode()
            status = answer.status
    except aiohttp.ClientPayloadError:  # the gateway cut its own answer
        return None, None
    answer = {"events": data.split("\n\n")} if exchange.stream else {"body": json.loads(data)}
    return status, reply_of(exchange.api, {"status": status, **answer})


async def _leave(stand: Stand, exchange: Exchange, body: Any, key: str) -> tuple[None, None]:
    """Send the request, and disconnect as soon as the engine has it."""
    assert stand.engine is not None
    before = stand.engine.calls

    async def wait() -> None:
        async with _posted(stand, exchange, body, key) as answer:
            await answer.read()

    client = asyncio.create_task(wait())
    while stand.engine.calls == before:
        await asyncio.sleep(0.005)
    client.cancel()
    await asyncio.gather(client, return_exceptions=True)
    return None, None


async def _rows(stand: Stand, key: str, known: set[int], wait: bool) -> list[Completion]:
    """The attempt's completions so far; after a client that left, as soon as its own is among them."""
    while True:
        rows = stand.recorded(key)
        if not wait or len(rows) > len(known):
            return rows
        await asyncio.sleep(0.005)
