"""What recorded agents leave in the pool is trained whole: each sampled token once, in the context it was sampled in.

Sub-agents, compactions, faults and odd echoes of real agents included. That trees of such rows have the gradient of
separate completions is the matter of tests/trainer/test_histories.py and tests/trainer/test_tree.py.
"""

from collections import Counter, defaultdict

import numpy as np
import pytest

from proxy.pool.untrained import Untrained
from proxy.prompt.template import ChatTemplate
from tests.captures.player import Played, Player
from tests.captures.recorded import sessions
from tests.proxy.conftest import Serve
from tests.proxy.test_recorded_agents import AT_ONCE, ROOM
from trainer.data.assemble import merge, why_not_trainable
from trainer.data.row import TrainingRow
from trainer.data.tree import distinct


@pytest.mark.parametrize(
    "runs",
    [pytest.param(("subagent", "compact_ctx"), id="branching"), pytest.param(None, marks=pytest.mark.long, id="all")],
)
async def test_every_token_of_a_recorded_agent_is_trained_in_its_own_context(
    runs: tuple[str, ...] | None, serve: Serve, template: ChatTemplate
) -> None:
    player = Player(template)
    stand = await serve(player, context_length=ROOM, limits=AT_ONCE)
    attempts: dict[int, list[Played]] = defaultdict(list)
    for session in (each for each in sessions() if runs is None or each.run in runs):
        for call in await player.play(session, stand):
            if call.row is not None:
                attempts[call.row.attempt_id].append(call)
    sampled = trained = flat = computed = parts = 0
    for calls in attempts.values():
        excluded = Counter[Untrained]()
        chain = sorted((call.row for call in calls if call.row is not None), key=lambda item: item.ordinal)
        rows = merge(chain, 1.0, excluded, why_not_trainable)
        check(rows, {call.row.id: call for call in calls if call.row is not None})
        own = sum(int(row.trained.sum()) for row in rows)
        assert own + sum(excluded.values()) == sum(len(item.sampled) for item in chain)
        sampled, trained, parts = sampled + own + sum(excluded.values()), trained + own, parts + len(rows)
        computed += distinct(rows)
        flat += sum(item.prompt_length + len(item.sampled) - 1 for item in chain)
    assert trained > 0.9 * sampled and parts > len(attempts) > 3
    assert computed < 0.5 * flat


def check(rows: list[TrainingRow], calls: dict[int, Played]) -> None:
    """Each completion of each row against what the engine saw and returned."""
    seen = [name for row in rows for name in row.completions]
    assert len(seen) == len(set(seen))
    for row in rows:
        for segment, name in enumerate(row.completions):
            item, path = calls[name].row, calls[name].path
            assert item is not None and row.tokens[: len(path)].tolist() == path.tolist()
            places = np.flatnonzero(row.trained & (row.segment == segment))
            assert places.tolist() == list(range(item.prompt_length, len(path)))
            assert row.rollout_logp[places].tolist() == item.logprobs.tolist()
