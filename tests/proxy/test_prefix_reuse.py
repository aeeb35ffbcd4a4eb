"""Two real SGLang replicas: each turn finds the tokens of the turns before it, a group its common prompt."""

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.sglang import EngineConfig, Sglang
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from tests.conftest import need
from tests.proxy.conftest import Serve, Stand, user

TURNS, GROUP, GROUPS = 20, 8, 3


@pytest.fixture
def second_engine(tiny_model: Path, tmp_path: Path) -> Iterator[Sglang]:
    """Another replica beside the one of the session."""
    need("sglang", find_spec("sglang") is not None)
    engine = Sglang(EngineConfig(model=str(tiny_model), dtype="float32"), tmp_path / "engine.log")
    try:
        engine.wait_healthy()
        yield engine
    finally:
        engine.stop()


def issued_keys(stand: Stand) -> list[list[str]]:
    """The keys of some groups' attempts."""
    run = open_run(stand.pool, "a run", "train", {})
    tasks = [{"id": f"t{number}", "domain": "agent"} for number in range(GROUPS)]
    groups = [open_group(stand.pool, run.id, task, GROUP) for task in tasks]
    return [[open_attempt(stand.pool, member.rollout_id, "command")[1] for member in group] for group in groups]


async def served(stand: Stand) -> list[int]:
    """Prompt tokens that each replica has served."""
    async with stand.http.get(f"{stand.url}/health") as answer:
        return [replica["prompt_tokens"] for replica in (await answer.json())["replicas"]]


async def begin(stand: Stand, key: str, task: str) -> dict[str, Any]:
    """Make the first call of a rollout and return its usage."""
    return (await stand.chat(user(task), key=key, max_tokens=8))["usage"]


async def rollout(stand: Stand, key: str, task: str) -> None:
    """Play turn after turn. At each one, the engine must have cached all that it shares with the turns before."""
    messages, total, cached = [user(task)], 0, 0
    for turn in range(TURNS):
        answer = await stand.chat(*messages, key=key, max_tokens=8)
        messages += [answer["choices"][0]["message"], user(f"go on with step {turn}")]
        hit = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        row = stand.recorded(key)[-1]
        assert hit >= row.prefix_length - 1, turn  # the engine never ran the last sampled token of that turn
        total, cached = total + row.prompt_length, cached + hit
    assert cached > 0.85 * total


@pytest.mark.long
async def test_turns_and_groups_find_their_prefixes(serve: Serve, sglang_engine: Sglang, second_engine: Sglang) -> None:
    stand = await serve(url=(sglang_engine.url, second_engine.url))
    groups = {f"This is task {number}. " * 60: keys for number, keys in enumerate(issued_keys(stand))}
    for task, (first, *others) in groups.items():
        before = await served(stand)
        await begin(stand, first, task)
        for usage in await asyncio.gather(*(begin(stand, key, task) for key in others)):
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1 > 200
        assert sorted(after > count for after, count in zip(await served(stand), before, strict=True)) == [False, True]
    await asyncio.gather(*(rollout(stand, keys[1], task) for task, keys in groups.items()))
