"""Recorded agents against the gateway: continuations are found and keep their tokens, nothing else is joined, and every
call has its label."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.pool.completions.labels import labels
from proxy.prompt.template import ChatTemplate
from tests.captures.oracle import Continuation, continuations
from tests.captures.player import Played, Player
from tests.captures.recorded import TRUTH, Session, sessions
from tests.proxy.conftest import Serve, Stand
from tests.proxy.written import WRITERS
from tests.proxy.zoo import FAMILIES, make_zoo

ROOM = 1 << 20
"""A context that no recorded session fills."""
AT_ONCE = {"linger_seconds": 0}
"""A call ends at once when its client goes, as the next request waits for its row."""
EVERYTHING = {"new": 110, "exact": 218, "rendered afresh": 5}
BRANCHING = ("subagent", "compact_ctx", "ctxlen", "echo")
"""Runs in which conversations part or begin again."""


async def test_no_false_fork_and_no_false_join(serve: Serve, template: ChatTemplate) -> None:
    player = Player(template)
    counts, wrong = await played(player, [await serve(player, context_length=ROOM, limits=AT_ONCE)], sessions())
    assert wrong == []
    assert counts == EVERYTHING
    assert player.unusual > 0.9 * player.sampled


@pytest.mark.parametrize(
    "runs", [pytest.param(BRANCHING, id="branching"), pytest.param(None, marks=pytest.mark.long, id="all")]
)
async def test_gateways_that_take_turns_know_the_same(
    serve: Serve, template: ChatTemplate, runs: tuple[str, ...] | None
) -> None:
    """Two gateways share a pool. One that is restarted before each call loses nothing by that."""
    player = Player(template)
    stands = [await serve(player, context_length=ROOM, limits=AT_ONCE) for _ in range(2)]
    counts, wrong = await played(player, stands, [each for each in sessions() if runs is None or each.run in runs])
    assert wrong == []
    assert counts == EVERYTHING if runs is None else counts["exact"] > 50


@pytest.mark.long
@pytest.mark.parametrize("family", ["DeepSeek-V3.1", "Kimi-K2"])
async def test_other_templates_change_nothing(serve: Serve, tiny_model: Path, tmp_path: Path, family: str) -> None:
    """One template has its own markers and end of turn; the other writes the calls' ids into the prompt."""
    template = make_zoo(tiny_model, tmp_path / "zoo")[family]

    def write(reply: dict[str, Any]) -> str:
        return reply["content"] + written_in(FAMILIES[family].way, reply["calls"])

    player = Player(template, write)
    stand = await serve(player, context_length=ROOM, limits=AT_ONCE, model=template.directory)
    counts, wrong = await played(player, [stand], [without_reasoning(session) for session in sessions()])
    assert wrong == []
    assert counts == {"new": 110, "exact": 220, "rendered afresh": 3}


async def test_a_turn_that_was_tokenised_again_is_noticed(serve: Serve, template: ChatTemplate) -> None:
    player = Player(template)
    stand = await serve(player, context_length=ROOM, limits=AT_ONCE, history="faithful")
    counts, wrong = await played(player, [stand], [session for session in sessions() if session.run == "basic"])
    assert counts["exact"] == 0 and len(wrong) == counts["false fork of tokens"] > 5


def written_in(way: str, calls: list[dict[str, Any]]) -> str:
    """Calls in a family's format; arguments that are no JSON as they stand, as no format can hold them."""
    named = [(f"{c['namespace']}__{c['name']}" if "namespace" in c else c["name"], c["arguments"]) for c in calls]
    try:
        return WRITERS[way][1]([(name, json.loads(arguments)) for name, arguments in named]) if calls else ""
    except ValueError:
        return "".join(arguments for _, arguments in named)


def without_reasoning(session: Session) -> Session:
    """The session of a model that does not reason."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(inner) for name, inner in value.items() if name != "reasoning_content"}
        return [without(inner) for inner in value] if isinstance(value, list) else value

    exchanges = (
        replace(each, body=without(each.body), reply=each.reply and {**each.reply, "reasoning": ""})
        for each in session.exchanges
    )
    return replace(session, exchanges=tuple(exchanges))


async def played(player: Player, stands: list[Stand], recordings: list[Session]) -> tuple[Counter[str], list[str]]:
    """Count the verdicts by kind, and list the wrong ones."""
    counts, wrong = Counter[str](), []
    for session in recordings:
        calls = await player.play(session, *stands)
        verdicts = judged(calls, continuations(session.exchanges))
        counts.update(verdict for _, verdict in verdicts)
        wrong += [f"{session.name} {seq}: {verdict}" for seq, verdict in verdicts if "false" in verdict]
        wrong += [f"{session.name} {seq}: label {label}" for seq, label in mislabelled(calls)]
    return counts, wrong


def mislabelled(played: list[Played]) -> list[tuple[int, str]]:
    """The rows whose label is not the purpose of their call."""
    label_of = labels([call.row for call in played if call.row is not None])
    known = [call for call in played if call.row is not None and call.exchange.kind in TRUTH]
    pairs = [(call.exchange, label_of[call.row.id]) for call in known if call.row is not None]
    return [(exchange.seq, label) for exchange, label in pairs if label != TRUTH[exchange.kind]]


def judged(played: list[Played], expected: list[Continuation]) -> list[tuple[int, str]]:
    """The verdict on each row: new | exact | rendered afresh | false fork | false join."""
    rows = {each.exchange.seq: each for each in played}
    verdicts = []
    for call, truth in zip(played, expected, strict=True):
        if call.row is None:
            continue
        followed = [rows[each.seq] for each in truth.follows]
        allowed = {each.row.id: each for each in followed if each.row is not None}
        verdicts.append((call.exchange.seq, _verdict(call, allowed, truth.exact)))
    return verdicts


def _verdict(call: Played, allowed: dict[int, Played], exact: bool) -> str:
    row = call.row
    assert row is not None
    if row.follows is not None and row.follows not in allowed:
        return "false join"
    if not allowed:
        return "new"
    if row.follows is None:
        return "false fork"
    before = allowed[row.follows].path
    whole = row.prefix_length >= len(before) and call.path[: len(before)] == before
    return "exact" if whole else "false fork of tokens" if exact else "rendered afresh"
