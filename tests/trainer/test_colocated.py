"""Engines on the trainer's own devices: the order of requests, and a trainer that dies at any point of it.

Not covered: memory, which only a GPU has to give up. The double dies where SGLang's scheduler does: when it is told to
take back what it has not given up, to load without room for weights, or to go on without a cache.
"""

import asyncio
from pathlib import Path

import pytest

from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import open_run
from proxy.pool.training.steps import Version
from tests.trainer.make import fill, make_config, make_push
from tests.trainer.sglang_double import Double, Start
from tests.trainer.test_not_finite import spoil
from tests.trainer.test_updates import CALM
from trainer.config import Push
from trainer.loop import train
from trainer.megatron.parallel import Ranks
from trainer.push.push import push, push_again, release
from trainer.push.weights import Weights
from trainer.run_state import RunState

RELEASE = ["pause_generation", "flush_cache", "release_memory_occupation kv_cache weights"]
PUSH = [
    "pause_generation",
    "resume_memory_occupation weights",
    "update_weights_from_disk",
    "resume_memory_occupation kv_cache",
    "continue_generation",
]


async def test_a_step_on_the_engines_devices(start: Start, weights: Weights) -> None:
    engine = Double(version="v6")
    options = Push(engines=await start(engine), colocated=True)
    await asyncio.to_thread(release, options)
    assert engine.calls == RELEASE and engine.version == "v6-released"
    assert engine.released == {"kv_cache", "weights"}
    engine.calls.clear()
    await asyncio.to_thread(push, weights, options)
    assert engine.calls == PUSH and (engine.version, engine.released, engine.paused) == ("v7", set(), False)


async def test_the_first_push_finds_engines_that_have_their_memory(start: Start, weights: Weights) -> None:
    engine = Double()
    await asyncio.to_thread(push, weights, Push(engines=await start(engine), colocated=True))
    assert engine.calls == [*RELEASE[:2], "release_memory_occupation kv_cache", *PUSH[2:]]
    assert (engine.version, engine.released, engine.dead) == ("v7", set(), False)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_engine_has_nothing_left_to_finish_when_it_frees_its_memory(start: Start, ranks: int) -> None:
    """SGLang dies if it has; and it has no cache to go on with once it has freed it."""
    engine = Double(version="v6", busy=1)
    engine.about["pp_size"] = ranks
    options = Push(engines=await start(engine), colocated=True)
    for _ in range(2):
        await asyncio.to_thread(release, options)
    moments = ["continue_generation", "pause_generation"] if ranks == 1 else []
    assert engine.calls == ["pause_generation", "flush_cache", *moments, *RELEASE[1:], "pause_generation"]
    assert (engine.version, engine.dead) == ("v6-released", False)


async def test_a_trainer_loads_its_policy_where_engines_have_released_their_memory(
    start: Start, model: Path, tmp_path: Path, ranks: Ranks
) -> None:
    engine = Double()
    config = make_config(tmp_path, steps=0, push=Push(engines=await start(engine), colocated=True))
    open_run(open_pool(config.pool), config.run, "train", {})
    await asyncio.to_thread(train, config, ranks)
    assert engine.calls == RELEASE + PUSH and not engine.dead


@pytest.mark.filterwarnings("ignore:overflow encountered")  # what makes the gradient infinite
async def test_engines_get_their_memory_back_in_a_push_also_where_a_batch_is_set_aside(
    start: Start, model: Path, tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a push, every rank empties torch's cache first; in a check of the engines, which is always due here, none."""
    engine, push_of_run = Double(), RunState.push

    def marked(run: RunState, version: Version) -> None:
        engine.calls.append("push begins")
        push_of_run(run, version)
        engine.calls.append("push ends")

    monkeypatch.setattr(RunState, "push", marked)
    monkeypatch.setattr("trainer.run_state.ENGINE_SECONDS", 0.0)
    monkeypatch.setattr("trainer.run_state.check_interval", lambda *_: 0.0)
    push = Push(engines=await start(engine), colocated=True)
    credit = {"returns": "turns", "scale": "domain"}  # the default divides by the group's deviation: all stays finite
    config = make_config(tmp_path, steps=1, push=push, report=CALM, credit=credit)
    pool = open_pool(config.pool)
    fill(pool, open_run(pool, config.run, "train", {}).id, 2)
    spoil(tmp_path, 1)
    await asyncio.to_thread(train, config, ranks)
    assert engine.calls == 3 * [*RELEASE, "push begins", *PUSH, "push ends"] and not engine.dead


async def test_after_a_death_anywhere_the_next_trainer_brings_the_weights_or_says_what_to_restart(
    start: Start, weights: Weights
) -> None:
    landed, restarted = 0, 0
    for requests in range(40):
        engine = Double(version="v6", patience=requests)
        options = make_push(engines=await start(engine), colocated=True, tries=1)
        try:
            await asyncio.to_thread(release, options)
            await asyncio.to_thread(push, weights, options)
        except UserError:
            pass  # the end of the first trainer
        else:
            break
        engine.patience = None
        try:
            await asyncio.to_thread(push, weights, options)
            landed += 1
        except UserError as error:
            assert "restart it" in str(error) and engine.version.endswith("-moving")
            engine.version, engine.released, engine.paused = "initial", set(), False
            again = await asyncio.to_thread(push_again, weights, options)
            assert again is not None and again.failed == {}
            restarted += 1
        assert (engine.version, engine.released, engine.dead, engine.paused) == ("v7", set(), False, False)
    assert landed > restarted == 6  # dead before or after each of the three moves


async def test_a_step_is_not_computed_beside_an_engine_that_keeps_its_memory(start: Start) -> None:
    (url,) = urls = await start(Double(faults={"release_memory_occupation": 500}))
    with pytest.raises(UserError, match=f"engine {url} failed at /release_memory_occupation .*restart this engine"):
        await asyncio.to_thread(release, Push(engines=urls, colocated=True))
