"""Pushes to real SGLang servers: two replicas of which one is killed, tensor ranks, an external cache, load."""

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import psutil
import pytest

from proxy.config import EngineConfig
from proxy.engine.process import free_port
from proxy.engine.sglang import Sglang
from proxy.engine.tiny_model import make_tiny_model
from proxy.pool.errors import UserError
from tests.conftest import need
from tests.trainer.make import make_push
from trainer.config import Push
from trainer.push.push import push, push_again
from trainer.push.target import PushFailed, PushTarget
from trainer.push.weights import Bucket, Weights

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
STORE = (
    "--enable-hierarchical-cache --hicache-storage-backend file --hicache-ratio 2 --page-size 16 "
    "--hicache-write-policy write_through --hicache-io-backend direct --hicache-mem-layout layer_first "
    "--hicache-storage-prefetch-policy wait_complete --disable-overlap-schedule"
).split()
SMALL = 1 << 19

FREE_BYTES = 13 * 10**9
"""SGLang 0.5.23 makes no cache in host memory that would leave less than 10 GiB of it free. Until it asks, the engine
itself takes up to 1.8 GB, measured."""
TOO_LITTLE = "Not enough host memory available"
"""How SGLang 0.5.23 refuses to make one."""

Begin = Callable[..., Sglang]


def wait_for_memory(deadline: float) -> None:
    """Wait until tests beside this one leave enough memory free, at most until `deadline`, in monotonic seconds."""
    while psutil.virtual_memory().available < FREE_BYTES and time.monotonic() < deadline:
        time.sleep(1)


@pytest.fixture
def models(tmp_path: Path) -> list[Weights]:
    """Three versions of a tiny model."""
    need("sglang", find_spec("sglang") is not None)
    for seed in range(3):
        make_tiny_model(tmp_path / f"v{seed}", seed=seed)
    return [Weights(f"v{seed}", tmp_path / f"v{seed}") for seed in range(3)]


@pytest.fixture
def begin(models: list[Weights], tmp_path: Path) -> Iterator[Begin]:
    """Start servers with the first version; stop them when the test ends."""
    with ExitStack() as stack:

        def begun(*arguments: str, port: int = 0) -> Sglang:
            config = EngineConfig(model=str(models[0].directory), dtype="float32", port=port, extra_args=arguments)
            engine = Sglang(config, tmp_path / "engine.log")
            stack.callback(engine.stop)
            return engine

        yield begun


@pytest.fixture
def storing(begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sglang:
    """A server with a cache in host memory and in files."""
    monkeypatch.setenv("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR", str(tmp_path / "store"))
    deadline = time.monotonic() + 600
    while True:
        wait_for_memory(deadline)
        engine = begin(*STORE)
        try:
            engine.wait_healthy()
            return engine
        except UserError as error:  # tests beside this one may take the memory while the engine starts
            if TOO_LITTLE not in str(error) or time.monotonic() > deadline:
                raise


@dataclass(frozen=True)
class Deadly(Weights):
    """Weights that run a function after their first bucket."""

    happens: Callable[[], None]

    def buckets(self, limit: int) -> Iterator[Bucket]:
        for bucket in super().buckets(limit):
            yield bucket
            self.happens()


def checksums(engine: Sglang) -> tuple[str, ...]:
    return PushTarget(engine.url, Push()).checksums()


def generate(engine: Sglang, prompt: list[int], tokens: int = 4) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": params}
    request = Request(engine.url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=300) as answer:
        meta: dict[str, Any] = json.loads(answer.read())["meta_info"]
    return meta


def test_a_replica_killed_in_mid_push_leaves_the_other_in_order_and_is_brought_there_later(
    begin: Begin, models: list[Weights]
) -> None:
    port = free_port()
    kept, lost = begin(), begin(port=port)
    for engine in (kept, lost):
        engine.wait_healthy()
    options = make_push(engines=(kept.url, lost.url), way="distributed", bucket_bytes=SMALL, tries=1)
    assert push(models[1], options).failed == {} and checksums(kept) == checksums(lost)
    done = push(Deadly(models[2].version, models[2].directory, lost.stop), options)
    assert list(done.ways) == [kept.url] and list(done.failed) == [lost.url]
    assert generate(kept, [5, 6, 7])["weight_version"] == "v2"
    assert push_again(models[2], options) is None  # it does not answer
    restarted = begin(port=port)
    restarted.wait_healthy()
    assert checksums(restarted) != checksums(kept)
    again = push_again(models[2], options)
    assert again is not None and list(again.ways) == [restarted.url]
    assert checksums(restarted) == checksums(kept) and generate(restarted, [5, 6, 7])["weight_version"] == "v2"


def test_an_engine_of_two_tensor_ranks_gets_the_same_weights_by_every_way(
    begin: Begin, models: list[Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    engine = begin("--tp-size", "2")
    engine.wait_healthy()
    sums = []
    for way in ("disk", "tensor", "distributed"):
        for weights in models[1:]:
            options = make_push(engines=(engine.url,), way=way, bucket_bytes=SMALL)  # type: ignore[arg-type]
            assert push(weights, options).ways == {engine.url: way}
            sums.append(checksums(engine))
    assert sums[:2] == sums[2:4] == sums[4:] and sums[0] != sums[1]
    assert [len(shards) for shards in sums] == [2] * 6


def flush(engine: Sglang, seconds: float = 60) -> None:
    """Flush an engine's cache as soon as it does not refuse, which it does while it copies from it."""
    end = time.monotonic() + seconds
    while True:
        try:
            PushTarget(engine.url, Push()).ask("/flush_cache", {})
            return
        except PushFailed:
            if time.monotonic() > end:
                raise
        time.sleep(0.1)


def test_no_cache_of_the_old_weights_outlives_a_push(storing: Sglang, models: list[Weights]) -> None:
    engine = storing
    prompt = np.random.default_rng(0).integers(10, 1900, 600).tolist()

    def cached() -> dict[str, int]:
        return generate(engine, prompt)["cached_tokens_details"] or {}

    cached()
    flush(engine)
    assert cached()["storage"] > 500  # which no flush reaches
    push(models[1], Push(engines=(engine.url,)))
    assert not any(count for where, count in cached().items() if where != "storage_backend")


def test_pushes_under_load_reach_an_engine_that_copies_its_cache(storing: Sglang, models: list[Weights]) -> None:
    """And no call gets tokens of anything but the versions that were pushed."""
    engine = storing
    push(models[0], Push(engines=(engine.url,)))
    over, served = Event(), []

    def caller(number: int) -> None:
        rng = np.random.default_rng(number)
        while not over.is_set():
            prompt = rng.integers(10, 1900, 300).tolist()
            served.append(generate(engine, prompt, int(rng.integers(20, 200))))

    with ThreadPoolExecutor(16) as threads:
        calling = [threads.submit(caller, number) for number in range(16)]
        try:
            for number in (1, 2, 1, 2):
                before = len(served)
                while len(served) < before + 16:
                    assert not any(call.done() for call in calling)
                    time.sleep(0.1)
                assert push(models[number], Push(engines=(engine.url,))).failed == {}
        finally:
            over.set()
        for call in calling:
            call.result()
    assert {span["version"] for meta in served for span in meta["weight_versions"]} == {"v0", "v1", "v2"}
    assert {meta["finish_reason"]["type"] for meta in served} == {"length"}
