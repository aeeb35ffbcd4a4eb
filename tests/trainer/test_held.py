"""Pushes leave an engine at the version that an evaluation holds it at, and bring it back when that has ended."""

import asyncio
import subprocess
import time
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import update

from proxy.pool.database import Pool
from proxy.pool.processes.owners import STALE_SECONDS, owned, this_process
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import policy_versions, runs
from proxy.pool.training.evaluations import held_engines, open_evaluation
from tests.trainer.make import make_config, make_push
from tests.trainer.sglang_double import Double, Start
from trainer.commands.rollback import roll_back
from trainer.config import Push
from trainer.megatron.parallel import Ranks
from trainer.push.held import without_held
from trainer.push.weights import Weights
from trainer.run_state import RunState


async def test_an_evaluation_holds_its_engine_until_it_has_ended(
    start: Start, weights: Weights, pool: Pool, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    free, held = Double(), Double()
    engines = await start(free, held)
    config = make_config(tmp_path, push=make_push(engines=engines, quorum=2))
    with await asyncio.to_thread(RunState, config, ranks) as run:
        places = tmp_path / "no checkpoint", weights.directory
        first = run.publish(0, places, {})
        await asyncio.to_thread(run.push, first)
        evaluation = open_evaluation(pool, run.pool_run, first, {}, engine=engines[1], rollouts=8)
        assert held_engines(pool, run.pool_run.id) == {}  # no harness is at it yet
        with owned(pool, find_run(pool, evaluation.name)):
            assert held_engines(pool, run.pool_run.id) == {engines[1]: first.name}
            second = run.publish(1, places, {}, parent=first)
            await asyncio.to_thread(run.push, second)
            assert (free.version, held.version) == (second.name, first.name) and not held.paused
            assert await asyncio.to_thread(run._repair_engines) is None and held.version == first.name
            ending = asyncio.create_task(asyncio.to_thread(run.bring_back_engines))
            await asyncio.sleep(0.5)
            assert not ending.done() and held.version == first.name  # the trainer's last step waits for it
        await ending
        assert free.version == held.version == second.name
    said = f"engine {engines[1]} stays at {first.name} until the evaluation of {first.name} has ended\n"
    assert capsys.readouterr().out.count(said) == 1


async def test_a_rollback_leaves_the_engine_of_an_evaluation_alone_and_names_it(
    start: Start, weights: Weights, pool: Pool, ranks: Ranks, tmp_path: Path
) -> None:
    free, held = Double(), Double()
    engines = await start(free, held)
    config = make_config(tmp_path, push=make_push(engines=engines, quorum=2), keep_checkpoints=9)
    (tmp_path / "checkpoint").mkdir()
    places = tmp_path / "checkpoint", weights.directory
    with await asyncio.to_thread(RunState, config, ranks) as run:
        first = run.publish(0, places, {})
        await asyncio.to_thread(run.push, first)
        second = run.publish(1, places, {}, parent=first)
        third = run.publish(2, places, {}, parent=second)
    evaluation = open_evaluation(pool, run.pool_run, first, {}, engine=engines[1], rollouts=8)
    free.version = third.name
    with owned(pool, find_run(pool, evaluation.name)):
        said = await asyncio.to_thread(roll_back, config, 1)
    assert (free.version, held.version) == (second.name, first.name) and not held.paused
    assert f"serve it, and {engines[1]} stays at {first.name} while the evaluation of {first.name} goes on; 0" in said
    said = await asyncio.to_thread(roll_back, config, 1)  # the evaluation has ended
    assert held.version == second.name and "2 of 2 engines serve it; 0 groups" in said


async def test_a_held_engine_that_refuses_a_push_gets_another_one_before_the_trainer_ends(
    start: Start, weights: Weights, pool: Pool, ranks: Ranks, tmp_path: Path
) -> None:
    free, held = Double(), Double()
    engines = await start(free, held)
    config = make_config(tmp_path, push=make_push(engines=engines, tries=1))
    with await asyncio.to_thread(RunState, config, ranks) as run:
        places = tmp_path / "no checkpoint", weights.directory
        first = run.publish(0, places, {})
        await asyncio.to_thread(run.push, first)
        evaluation = open_evaluation(pool, run.pool_run, first, {}, engine=engines[1], rollouts=8)
        with owned(pool, find_run(pool, evaluation.name)):
            second = run.publish(1, places, {}, parent=first)
            await asyncio.to_thread(run.push, second)
        held.faults["update_weights_from_disk"] = 500
        held.calls.clear()
        ending = asyncio.create_task(asyncio.to_thread(run.bring_back_engines))
        while "update_weights_from_disk" not in held.calls:
            await asyncio.sleep(0.05)
        held.faults.clear()
        await ending
        assert free.version == held.version == second.name


async def test_a_held_engine_that_push_engines_does_not_name_is_told(
    start: Start, weights: Weights, pool: Pool, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engines = await start(Double(), Double())
    with await asyncio.to_thread(RunState, make_config(tmp_path, push=make_push(engines=engines)), ranks) as run:
        version = run.publish(0, (tmp_path / "no checkpoint", weights.directory), {})
        evaluation = open_evaluation(pool, run.pool_run, version, {}, engine="http://elsewhere:1", rollouts=8)
        with owned(pool, find_run(pool, evaluation.name)):
            await asyncio.to_thread(run.push, version)
    assert "hold engine http://elsewhere:1, and push.engines does not name it" in capsys.readouterr().out


async def test_an_evaluation_whose_harness_died_holds_nothing(
    pool: Pool, ranks: Ranks, tmp_path: Path, weights: Weights
) -> None:
    with await asyncio.to_thread(RunState, make_config(tmp_path), ranks) as run:
        version = run.publish(0, (tmp_path / "no checkpoint", weights.directory), {})
        evaluation = open_evaluation(pool, run.pool_run, version, {}, engine="http://a", rollouts=8)
        dead = subprocess.Popen(["true"])
        dead.wait()
        for change, holds in (({}, True), ({"pid": dead.pid}, False), ({"machine": "elsewhere"}, False)):
            owner = msgspec.to_builtins(msgspec.structs.replace(this_process(), **change))
            values = {"owner": owner, "owner_seen_at": time.time() - STALE_SECONDS}
            with pool.write() as connection:
                connection.execute(update(runs).where(runs.c.id == evaluation.run_id).values(values))
            assert bool(held_engines(pool, run.pool_run.id)) == holds


async def test_what_is_held_must_be_current_and_leaves_an_engine_to_push_to(
    start: Start, pool: Pool, ranks: Ranks, tmp_path: Path, weights: Weights
) -> None:
    urls = await start(Double(version="v1"), Double(version="v2"))

    def left(held: dict[str, str], version: str = "v2", colocated: bool = False) -> list[str]:
        options = Push(engines=urls, colocated=colocated)
        return list(without_held(options, held, version)[1])

    assert await asyncio.to_thread(left, {urls[0]: "v1"}) == [urls[0]]
    assert await asyncio.to_thread(left, {urls[0]: "v1"}, "v1") == []  # it is to serve what is pushed
    assert await asyncio.to_thread(left, {urls[0]: "v0"}) == []  # it serves something else
    assert await asyncio.to_thread(left, {"http://127.0.0.1:9": "v1"}) == []
    assert await asyncio.to_thread(left, {urls[0]: "v1", urls[1]: "v2"}, "v3") == []
    assert await asyncio.to_thread(left, {urls[0]: "v1"}, colocated=True) == []
    with await asyncio.to_thread(RunState, make_config(tmp_path), ranks) as run:
        version = run.publish(0, (tmp_path / "no checkpoint", weights.directory), {})
        evaluation = open_evaluation(pool, run.pool_run, version, {}, engine=urls[0], rollouts=8)
        with owned(pool, find_run(pool, evaluation.name)):
            assert held_engines(pool, run.pool_run.id) == {urls[0]: version.name}
            with pool.write() as connection:
                connection.execute(update(policy_versions).values(retired_at=1.0))  # by a rollback
            assert held_engines(pool, run.pool_run.id) == {}
