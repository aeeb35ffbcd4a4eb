"""Recorded agents against the gateway: every continuation is found and keeps its tokens, nothing else is joined."""

from collections import Counter

import pytest

from proxy.template import ChatTemplate
from tests.captures.oracle import Continuation, continuations
from tests.captures.player import Played, Player
from tests.captures.recorded import sessions
from tests.proxy.conftest import Serve

ROOM = 1 << 20
"""A context that no recorded session fills."""


@pytest.mark.parametrize("gateways", [1, 2])
async def test_no_false_fork_and_no_false_join(serve: Serve, template: ChatTemplate, gateways: int) -> None:
    """Two gateways on one pool take turns, as one that is restarted before each call would."""
    player = Player(template)
    stands = [await serve(player, context_length=ROOM) for _ in range(gateways)]
    wrong, counts = [], Counter[str]()
    for session in sessions():
        verdicts = judged(await player.play(session, *stands), continuations(session.exchanges))
        counts.update(verdict for _, verdict in verdicts)
        wrong += [f"{session.name} {seq}: {verdict}" for seq, verdict in verdicts if "false" in verdict]
    assert wrong == []
    assert counts == {"new": 110, "exact": 219, "rendered afresh": 4}
    assert player.unusual > 0.9 * player.sampled


def judged(played: list[Played], expected: list[Continuation]) -> list[tuple[int, str]]:
    """For each row: new | exact | rendered afresh | false fork | false join."""
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
