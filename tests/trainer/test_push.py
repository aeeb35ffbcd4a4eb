"""Pushes: the order of requests, the check of versions, and what happens when an engine fails.

With real engines: tests/trainer/test_engine.py and tests/trainer/test_pushes.py.
"""

import asyncio
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from sqlalchemy import null, select, update
from torch import Tensor
from torch.distributed import Work

from proxy.engine.process import free_port
from proxy.pool import schema
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts import runs
from proxy.pool.terminal import progress
from proxy.pool.training import steps
from tests.trainer.make import fill, make_config, make_push
from tests.trainer.sglang_double import Double, Start
from tests.trainer.test_loop import prepare
from trainer.config import Push
from trainer.megatron.parallel import Ranks
from trainer.push import distributed
from trainer.push.push import PushResult, push, push_again, push_patiently
from trainer.push.target import PushFailed, PushTarget, nobody_else
from trainer.push.weights import Weights
from trainer.run_state import RunState, check_interval

ORDER = ["pause_generation", "flush_cache", "update_weights_from_disk", "continue_generation"]
NOWHERE = "http://127.0.0.1:9"


async def pushed(weights: Weights, options: Push) -> PushResult:
    return await asyncio.to_thread(push, weights, options)


async def pushed_again(weights: Weights, options: Push) -> PushResult | None:
    return await asyncio.to_thread(push_again, weights, options)


async def test_every_engine_is_paused_loaded_checked_and_continued(start: Start, weights: Weights) -> None:
    first, second = Double(), Double()
    urls = await start(first, second)
    done = await pushed(weights, Push(engines=urls))
    assert first.calls == second.calls == ORDER and not first.paused
    assert first.version == second.version == "v7"
    assert done.ways == dict.fromkeys(urls, "disk") and done.failed == {} and done.seconds > 0


async def test_nothing_is_paused_for_weights_that_are_not_there(start: Start, tmp_path: Path) -> None:
    engine = Double()
    urls = await start(engine)
    with pytest.raises(UserError, match=f"{tmp_path} has no weights"):
        await pushed(Weights("v7", tmp_path), Push(engines=urls))
    assert engine.calls == []


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("server_info", 500),
        ("pause_generation", 500),
        ("flush_cache", 500),
        ("flush_cache", "hang"),
        ("update_weights_from_disk", 500),
        ("update_weights_from_disk", "hang"),
    ],
)
async def test_the_others_go_on_without_an_engine_that_fails(
    start: Start, weights: Weights, path: str, fault: str | int
) -> None:
    """And so does that one, unless its weights may have changed."""
    good, bad = Double(version="v6"), Double(version="v6", faults={path: fault})
    urls = await start(good, bad)
    done = await pushed(weights, make_push(engines=urls, tries=1, timeout_seconds=6))
    assert good.version == "v7" and not good.paused and list(done.ways) == [urls[0]]
    assert list(done.failed) == [urls[1]] and f"failed at /{path}" in done.failed[urls[1]]
    loading = path == "update_weights_from_disk"
    assert (bad.version, bad.paused) == (("v7-loading", True) if loading else ("v6", False))


@pytest.mark.parametrize(
    ("version", "faults"),
    [("v6", {"flush_cache": 500, "continue_generation": 500}), ("v7-loading", {"flush_cache": 500})],
)
async def test_calls_of_an_engine_that_stays_paused_because_its_pause_failed_are_aborted(
    start: Start, weights: Weights, version: str, faults: dict[str, str | int]
) -> None:
    engine = Double(version=version, faults=faults)
    with pytest.raises(UserError, match="failed at /flush_cache"):
        await pushed(weights, Push(engines=await start(engine)))
    assert (engine.version, engine.paused, engine.calls[-1]) == (version, True, "abort_request")


async def test_a_flush_may_take_as_long_as_a_load(start: Start, weights: Weights) -> None:
    """As it does while the engine's scheduler compiles kernels."""
    engine = Double(version="v6", obeyed={"flush_cache": lambda: asyncio.sleep(5)})
    done = await pushed(weights, make_push(engines=await start(engine), answer_seconds=3))
    assert done.failed == {} and (engine.version, engine.paused) == ("v7", False)


async def test_an_engine_that_failed_to_load_names_no_version_that_a_run_knows_and_is_repaired(
    start: Start, weights: Weights
) -> None:
    good, bad = Double(version="v6"), Double(version="v6", faults={"update_weights_from_disk": 500})
    options = Push(engines=await start(good, bad))
    await pushed(weights, options)
    assert (bad.version, bad.paused, bad.calls[-1]) == ("v7-loading", True, "abort_request")
    again = await pushed_again(weights, options)
    assert again is not None and again.ways == {} and list(again.failed) == [options.engines[1]]
    bad.faults = {}
    before = list(good.calls)
    again = await pushed_again(weights, options)
    assert again is not None and list(again.ways) == [options.engines[1]]
    assert (bad.version, bad.paused) == ("v7", False) and good.calls == before  # its own calls went on meanwhile
    assert await pushed_again(weights, options) is None


@pytest.mark.parametrize("colocated", [False, True])
async def test_an_engine_that_does_not_go_on_names_no_version_that_a_run_knows_and_is_repaired(
    start: Start, weights: Weights, colocated: bool
) -> None:
    good, bad = Double(version="v6"), Double(version="v6", faults={"continue_generation": 500})
    options = Push(engines=await start(good, bad), colocated=colocated)
    done = await pushed(weights, options)
    assert list(done.failed) == [options.engines[1]] and (bad.version, bad.paused) == ("v7-paused", True)
    bad.faults = {}
    again = await pushed_again(weights, options)
    assert again is not None and again.failed == {} and (bad.version, bad.paused, bad.dead) == ("v7", False, False)


@pytest.mark.parametrize("version", ["v6", "v7-loading"])
async def test_an_engine_that_cannot_flush_while_it_is_paused_goes_on_for_moments_before_it_is_changed(
    start: Start, weights: Weights, version: str
) -> None:
    """Also one that an earlier push has left with weights of no version, but without its calls."""
    names: list[str] = []
    engine = Double(version=version, paused=version != "v6", busy=2)

    async def note_name() -> None:
        names.append(engine.version)

    engine.obeyed["continue_generation"] = note_name
    assert (await pushed(weights, Push(engines=await start(engine)))).failed == {}
    abort = [] if version == "v6" else ["abort_request"]
    moment = ["flush_cache", *abort, "continue_generation", "pause_generation", *abort]
    assert engine.calls == ["pause_generation", *moment, *moment, *ORDER[1:]]
    assert (engine.version, engine.paused, names) == ("v7", False, [version])


@pytest.mark.parametrize("version", ["v6", "v7-loading"])
async def test_an_engine_that_never_comes_to_a_flush_keeps_its_weights_and_goes_on_with_those_of_a_version(
    start: Start, weights: Weights, version: str
) -> None:
    good, bad = Double(version="v6"), Double(version=version, busy=1000)
    urls = await start(good, bad)
    done = await pushed(weights, make_push(engines=urls, timeout_seconds=1))
    assert (
        list(done.ways) == [urls[0]] and "compiling grammars within push.timeout_seconds = 1," in done.failed[urls[1]]
    )
    assert (bad.version, bad.paused) == (version, version != "v6") and "update_weights_from_disk" not in bad.calls


@pytest.mark.parametrize("busy", [2, 10**9])
async def test_calls_of_pipeline_ranks_end_before_the_weights_change(start: Start, weights: Weights, busy: int) -> None:
    """Their schedulers do not pause, so nothing is retracted, and new calls are kept waiting until the running end."""
    engine = Double(version="v6", busy=busy)
    engine.about["pp_size"] = 2
    options = make_push(engines=await start(engine), timeout_seconds=300 if busy == 2 else 0.5)
    if busy == 2:
        assert (await pushed(weights, options)).failed == {}
        assert engine.calls == [ORDER[0], *3 * ["flush_cache"], *ORDER[2:]] and engine.version == "v7"
    else:
        with pytest.raises(UserError, match=r"did not finish its calls within push.timeout_seconds = 0.5, .* higher"):
            await pushed(weights, options)
        assert engine.calls[-1] == "continue_generation" and engine.version == "v6"
    assert not engine.paused and {"mode": "in_place"} in engine.bodies


async def test_an_engine_that_was_restarted_is_brought_there_and_one_that_is_down_is_left(
    start: Start, weights: Weights
) -> None:
    first, second = Double(), Double()
    urls = await start(first, second)
    await pushed(weights, Push(engines=urls))
    first.version = "initial"
    again = await pushed_again(weights, Push(engines=(*urls, NOWHERE)))
    assert again is not None and list(again.ways) == [urls[0]] and first.version == "v7"


async def test_too_few_engines_are_an_error_that_names_each(start: Start, weights: Weights) -> None:
    good, bad = Double(), Double(faults={"update_weights_from_disk": 500})
    urls = await start(good, bad)
    with pytest.raises(UserError, match=f"1 of 3 engines serve v7 and push.quorum is 2: engine {NOWHERE} .*{urls[1]}"):
        await pushed(weights, make_push(engines=(*urls, NOWHERE), quorum=2, tries=1))
    assert good.version == "v7" and not good.paused
    with pytest.raises(
        UserError, match=f"0 of 1 engines .*engine {NOWHERE} failed at /server_info .*start the trainer"
    ):
        await pushed(weights, make_push(engines=(NOWHERE,), tries=1))


async def test_an_engine_that_says_yes_and_serves_something_else_is_out(start: Start, weights: Weights) -> None:
    good, bad = (
        Double(),
        Double(version="v3", faults={"update_weight_version": "lie", "update_weights_from_disk": "lie"}),
    )
    urls = await start(good, bad)
    done = await pushed(weights, Push(engines=urls))
    assert done.failed == {urls[1]: "serves weights 'v3' instead of 'v7'"}
    assert bad.paused and bad.calls[-1] == "abort_request"


async def test_engines_whose_weights_differ_from_the_others_are_out(start: Start, weights: Weights) -> None:
    engines = [Double(checksum="a"), Double(checksum="b"), Double(checksum="b")]
    urls = await start(*engines)
    options = Push(engines=urls)
    done = await pushed(weights, options)
    assert done.failed == {urls[0]: "has other weights than its peers (checksums a, not b)"}
    assert engines[0].paused and engines[0].version == "v7-loading"
    again = await pushed_again(weights, options)  # alone in this push, it is held against those that serve
    assert again is not None and list(again.failed) == [urls[0]]
    engines[0].checksum = "b"
    again = await pushed_again(weights, options)
    assert again is not None and again.failed == {}


async def test_engines_of_another_shape_are_not_compared(start: Start, weights: Weights) -> None:
    one, two = Double(checksum="a"), Double(checksum="b")
    two.about["tp_size"] = 2
    assert (await pushed(weights, Push(engines=await start(one, two)))).failed == {}


async def test_tensors_come_whole_in_buckets_of_bounded_size_and_the_version_with_the_last(
    start: Start, weights: Weights
) -> None:
    engine = Double()
    engine.about["tp_size"] = 2
    options = make_push(engines=await start(engine), way="tensor", bucket_bytes=1 << 15)
    await pushed(weights, options)
    expected = load_file(weights.directory / "model.safetensors")
    got = {name: tensor for bucket in engine.buckets for name, tensor in bucket.items()}
    assert got.keys() == expected.keys() and all((got[name] == expected[name]).all() for name in got)
    sizes = [sum(tensor.nbytes for tensor in bucket.values()) for bucket in engine.buckets]
    assert len(sizes) > 2 and max(sizes) <= 1 << 14  # a request holds each bucket once per tensor rank
    sent = [body for body in engine.bodies if "serialized_named_tensors" in body]
    assert [body.get("weight_version") for body in sent] == [None] * (len(sent) - 1) + ["v7-loading"]
    assert [body["flush_cache"] for body in sent] == [False] * (len(sent) - 1) + [True]
    assert {len(body["serialized_named_tensors"]) for body in sent} == {2}
    assert engine.version == "v7" and not engine.in_session


@pytest.mark.parametrize(("way", "line"), [("tensor", r"pushing v7: \d+ of \d+ MB"), ("disk", r"pushing v7: \d+ s$")])
async def test_a_push_shows_what_it_knows_of_its_progress(
    start: Start,
    weights: Weights,
    way: Any,
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)  # as fast as lines can be printed
    await pushed(weights, make_push(engines=await start(Double(), Double()), way=way))
    assert re.search(f"^{line}", capfd.readouterr().err, re.MULTILINE)
    sent: list[float] = []
    assert len(list(replace(weights, sent=sent.append).buckets(1 << 15))) == len(sent) > 2
    assert sum(sent) == pytest.approx(sum(part.bytes for part in weights.tensors()) / progress.MEGABYTE)


async def test_a_session_that_a_dead_trainer_left_open_is_closed_first(start: Start, weights: Weights) -> None:
    engine = Double(in_session=True, paused=True, version="v6-loading")
    await pushed(weights, Push(engines=await start(engine), way="tensor"))
    assert (engine.version, engine.in_session, engine.paused) == ("v7", False, False)


async def test_an_engine_lost_between_two_buckets_keeps_the_loading_name(start: Start, weights: Weights) -> None:
    engine = Double(version="v6", faults={"update_weights_from_tensor": 500})
    options = make_push(engines=await start(engine), way="tensor", bucket_bytes=1 << 14)
    with pytest.raises(UserError, match="failed at /update_weights_from_tensor"):
        await pushed(weights, options)
    assert (engine.version, engine.in_session, engine.paused) == ("v7-loading", False, True)


@pytest.mark.parametrize("way", ["tensor", "distributed"])
@pytest.mark.parametrize("size", ["dp_size", "pp_size"])
async def test_another_way_is_chosen_where_sglang_refuses_and_it_is_said(
    start: Start, weights: Weights, way: str, size: str
) -> None:
    engine = Double()
    engine.about[size] = 2
    (url,) = urls = await start(engine)
    done = await pushed(weights, Push(engines=urls, way=way))  # type: ignore[arg-type]
    assert done.ways == {url: "disk"} and engine.calls == ORDER
    assert done.notes[0].startswith(f"engine {url} has ") and f"push.way = {way}" in done.notes[0]


async def test_a_group_that_the_engine_does_not_join_is_given_up(start: Start, weights: Weights) -> None:
    engine = Double(version="v6", faults={"init_weights_update_group": 500})
    options = make_push(engines=await start(engine), way="distributed", answer_seconds=6)
    with pytest.raises(UserError, match="did not join the group at 127.0.0.1 .*push.address"):
        await pushed(weights, options)
    assert engine.paused and not engine.in_session


@pytest.mark.skipif(torch.cuda.is_available(), reason="this trainer has a GPU")
async def test_a_trainer_without_a_gpu_says_so_to_an_engine_on_one(start: Start, weights: Weights) -> None:
    engine = Double(version="v6")
    engine.about["device"] = "cuda"
    with pytest.raises(UserError, match="needs NCCL for a broadcast, and this trainer has no GPU; set push.way to"):
        await pushed(weights, make_push(engines=await start(engine), way="distributed"))
    assert engine.paused and "init_weights_update_group" not in engine.calls


class Joined:
    """A backend whose broadcasts return only when all ranks have joined them, as the first one of NCCL does."""

    def __init__(self, gloo: Any):
        self.gloo = gloo

    def broadcast(self, tensors: list[Tensor]) -> Work:
        work = self.gloo.broadcast(tensors)
        work.wait()
        return work


@pytest.mark.parametrize("fault", [None, 500])
async def test_an_engine_is_asked_to_join_a_broadcast_that_waits_for_it(
    start: Start, weights: Weights, fault: int | None
) -> None:
    engine = Double(faults={"update_weights_from_distributed": fault} if fault else {})
    (url,) = await start(engine)
    target = PushTarget(url, make_push(way="distributed", timeout_seconds=30))
    (bucket,) = weights.buckets(1 << 29)

    def send() -> None:
        with distributed._group(target, "g") as gloo, target.session():
            distributed._broadcast(target, Joined(gloo), bucket, {"group_name": "g", "weight_version": "v7"})

    if fault:
        with pytest.raises(PushFailed, match="failed at /update_weights_from_distributed"):
            await asyncio.to_thread(send)
    else:
        await asyncio.to_thread(send)
        (received,) = engine.buckets
        assert received.keys() == dict(bucket.tensors).keys() and engine.version == "v7"
        assert all(torch.equal(received[name], tensor) for name, tensor in bucket.tensors)
    assert not engine.in_session


class Unsendable:
    """A backend that is given tensors which it cannot send."""

    def __init__(self, gloo: Any):
        self.gloo = gloo

    def broadcast(self, tensors: list[Tensor]) -> Work:
        return self.gloo.broadcast([tensor.to("meta") for tensor in tensors])


async def test_the_trainers_own_error_in_a_broadcast_is_told(start: Start, weights: Weights) -> None:
    (url,) = await start(Double(group_seconds=5))
    target = PushTarget(url, make_push(way="distributed", timeout_seconds=3))
    (bucket,) = weights.buckets(1 << 29)

    def send() -> None:
        with distributed._group(target, "g") as gloo, target.session():
            distributed._broadcast(target, Unsendable(gloo), bucket, {"group_name": "g", "weight_version": "v7"})

    with pytest.raises(PushFailed, match=r"the broadcast to it failed, too \(.*meta"):
        await asyncio.to_thread(send)


async def test_a_store_outside_of_the_engine_is_cleared_before_it_goes_on(start: Start, weights: Weights) -> None:
    engine = Double()
    engine.about["hicache_storage_backend"] = "file"
    await pushed(weights, Push(engines=await start(engine)))
    assert engine.calls == [*ORDER[:3], "hicache/storage-backend/clear", ORDER[3]]


async def test_a_trainer_that_waits_for_rollouts_repairs_an_engine_that_was_restarted(
    start: Start, weights: Weights, pool: Pool, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Double()
    engine.about |= {"max_req_input_len": 40_000, "dtype": "bfloat16", "enable_fp32_lm_head": True}
    parallel = {"precision": "bfloat16", "head_float32": True}
    config = make_config(tmp_path, push=Push(engines=await start(engine)), parallel=parallel)
    with await asyncio.to_thread(RunState, config, ranks) as run:
        version = run.publish(0, (tmp_path / "no checkpoint", weights.directory), {})
        engine.about["enable_fp32_lm_head"] = False  # it was started again, with other flags
        for _ in range(2):
            await asyncio.to_thread(run.push, version)
        numbers = "the engines accept prompts of 40000 tokens, and batch.max_tokens = 32768: completions with longer"
        heads = (
            f"parallel.head_float32 = true, and the heads of these engines compute in bf16: {config.push.engines[0]};"
        )
        printed = capsys.readouterr().out
        assert (printed.count(numbers), printed.count(heads)) == (1, 1)
        assert engine.version == version.name and run.pause_seconds > 0
        engine.version = "initial"
        waiting = asyncio.create_task(asyncio.to_thread(run.wait_for_lease, 1))
        while engine.version != version.name:  # until pytest's timeout
            assert not waiting.done()
            await asyncio.sleep(0.05)
        fill(pool, run.pool_run.id, 2)
        assert len((await waiting).groups) == 2


@pytest.mark.parametrize(("engine_has", "way_out"), [(True, "without"), (False, "with")])
async def test_heads_of_engines_are_compared_when_the_trainer_starts(
    start: Start, ranks: Ranks, tmp_path: Path, engine_has: bool, way_out: str
) -> None:
    there, away, silent = Double(), Double(dead=True), Double()
    there.about |= {"dtype": "bfloat16", "enable_fp32_lm_head": engine_has}
    engines = await start(there, away, silent)
    half = {"precision": "bfloat16", "head_float32": not engine_has}
    config = make_config(tmp_path, push=Push(engines=engines), parallel=half)
    sentence = f"compute in {'fp32' if engine_has else 'bf16'}: {engines[0]}; .* start SGLang {way_out} --enable"
    with pytest.raises(UserError, match=sentence):
        await asyncio.to_thread(RunState, config, ranks)
    for parallel in (half | {"head_float32": engine_has}, {"head_float32": False}):
        with await asyncio.to_thread(RunState, make_config(tmp_path, push=config.push, parallel=parallel), ranks):
            assert not there.calls  # nothing but questions


async def test_a_trainer_that_was_replaced_changes_no_engine(
    start: Start, weights: Weights, pool: Pool, ranks: Ranks, tmp_path: Path
) -> None:
    engine = Double()
    config = make_config(tmp_path, push=Push(engines=await start(engine)))
    with await asyncio.to_thread(RunState, config, ranks) as run:
        version = run.publish(0, (tmp_path / "no checkpoint", weights.directory), {})
        await asyncio.to_thread(run.push, version)
        before = engine.calls.copy()

        async def replace() -> None:
            with pool.write() as connection:
                connection.execute(update(schema.runs).values(trainer={"token": "of another one"}))

        engine.obeyed["pause_generation"] = replace  # in the middle of a push
        with pytest.raises(UserError, match="another trainer has taken over run 'demo'"):
            await asyncio.to_thread(run.push, version)
        assert engine.calls == [*before, "pause_generation"] and engine.version == version.name
        with pytest.raises(UserError, match="another trainer has taken over"):
            await asyncio.to_thread(run.push, version)
        engine.version = "initial"
        for work in (run._repair_engines, run.demand_owner):
            with pytest.raises(UserError, match="another trainer has taken over"):
                await asyncio.to_thread(work)
        assert engine.calls == [*before, "pause_generation"] and engine.version == "initial"
    with pool.write() as connection:
        connection.execute(update(schema.runs).values(trainer=null()))
    with await asyncio.to_thread(RunState, config, ranks) as run:  # the one that has taken it over
        await asyncio.to_thread(run.push, version)
    assert engine.version == version.name and not engine.paused


async def test_a_push_waits_for_an_engine_that_is_away(
    start: Start, weights: Weights, pool: Pool, ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It goes on when the engine is back, and ends when another trainer takes the run over meanwhile."""
    there, away, port = Double(), Double(), free_port()
    gone = f"http://127.0.0.1:{port}"
    push_settings = make_push(engines=(*await start(there), gone), quorum=2, tries=1)
    with await asyncio.to_thread(RunState, make_config(tmp_path, push=push_settings), ranks) as run:
        version = run.publish(0, (tmp_path / "no checkpoint", weights.directory), {})
        with pool.read() as connection:
            [owner] = connection.scalars(select(schema.runs.c.trainer))
        for replaced in (True, False):
            there.version = "initial"
            pushing = asyncio.create_task(asyncio.to_thread(run.push, version))
            while there.version != version.name:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            assert not pushing.done()
            if replaced:
                set_trainer(pool, {"token": "of another one"})
                with pytest.raises(UserError, match="another trainer has taken over run 'demo'"):
                    await pushing
                set_trainer(pool, owner)
        await start(away, port=port)
        await pushing
        assert there.version == away.version == version.name and not (there.paused or away.paused)
        assert there.calls == 3 * ORDER  # pushed to when the push began, and with the other one
        assert run.engine_wait_seconds > 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("waiting")]
    assert lines == 2 * [f"waiting up to 30 minutes to push {version.name} to engines that are away: {gone}"]


def set_trainer(pool: Pool, trainer: Any) -> None:
    with pool.write() as connection:
        connection.execute(update(schema.runs).values(trainer=trainer))


async def test_a_push_waits_no_longer_than_its_patience(start: Start, weights: Weights) -> None:
    options, began = make_push(engines=(NOWHERE,), tries=1, patience_seconds=0.5), time.monotonic()
    sentence = rf"waited (\d+) s for engines that are away: 0 of 1 engines .*engine {NOWHERE}"
    with pytest.raises(UserError, match=sentence) as raised:
        await asyncio.to_thread(push_patiently, weights, options, nobody_else, print)
    found = re.search(sentence, str(raised.value))
    assert found is not None and 1 <= int(found[1]) <= round(time.monotonic() - began)


@pytest.mark.parametrize(
    ("before", "done", "took", "seconds"),
    [
        (5, None, 0.1, 5),
        (5, None, 30, 300),  # a machine that is gone answers nothing at all
        (5, PushResult(failed={"a": "failed"}), 40, 10),
        (200, PushResult(failed={"a": "failed"}), 1, 300),
        (80, PushResult(ways={"a": "disk"}), 40, 5),
    ],
)
def test_engines_are_checked_less_often_while_a_check_is_in_vain(
    before: float, done: PushResult | None, took: float, seconds: float
) -> None:
    assert check_interval(before, done, took) == seconds


async def launch(directory: Path, url: str) -> int:
    command = ["-m", "trainer", "launch", str(directory / "trainer.toml"), "--set", f'push.engines=["{url}"]']
    process = await asyncio.create_subprocess_exec(sys.executable, *command, "--steps=1")
    return await process.wait()


@pytest.mark.long
async def test_a_push_that_failed_is_repeated_by_the_next_start(start: Start, tmp_path: Path) -> None:
    directory = prepare(tmp_path)
    pool = open_pool(str(directory / "pool.db"))
    bad, engine = Double(faults={"update_weights_from_disk": 500}), Double()
    there, url = await start(bad, engine)
    assert await launch(directory, there) == 2
    version = steps.latest(pool, runs.find_run(pool, "demo").id)
    assert version is not None and (version.step, version.pushed_at) == (0, None)
    assert await launch(directory, url) == 0
    version = steps.latest(pool, runs.find_run(pool, "demo").id)
    assert version is not None and version.pushed_at is not None and engine.version == version.name
    assert engine.calls.count("update_weights_from_disk") == 2
    assert steps.metrics(pool, version.run_id)[-1]["pause_seconds"] > 0


async def test_engines_that_name_no_checksums_do_not_pass_for_equal(start: Start, weights: Weights) -> None:
    urls = await start(Double(checksum=""), Double(checksum=""))
    with pytest.raises(UserError, match="reports no checksums of its weights"):
        await pushed(weights, Push(engines=urls))
