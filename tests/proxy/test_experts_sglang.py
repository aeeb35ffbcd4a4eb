"""The real SGLang with a mixture of experts: the choices that it reports are recorded, and its weights lead to them."""

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from proxy.config import EngineConfig
from proxy.engine.sglang import CPU_PATH, Sglang
from proxy.pool.completions.routed_experts import RoutedExperts
from tests.conftest import need
from tests.proxy.conftest import Serve, listening, user
from tests.proxy.mixtures import EXPERTS, SIZES, TOP_K, make_mixture
from tests.proxy.test_sglang import Relay

if TYPE_CHECKING:
    from tests.trainer.recompute import Recompute

pytestmark = pytest.mark.long
CLOSE = 1e-3
"""Router scores that lie nearer to each other than this may go either way."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "mixture"
    make_mixture(directory)
    return directory


@pytest.fixture(scope="module")
def mixture_engine(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    need("sglang", find_spec("sglang") is not None)
    config = EngineConfig(model=str(mixture), dtype="float32", routed_experts=True)
    engine = Sglang(config, tmp_path_factory.mktemp("sglang") / "engine.log")
    try:
        engine.wait_healthy()
        yield engine
    finally:
        engine.stop()


REFERENCE = """
import json, sys, numpy, torch
from transformers import AutoModelForCausalLM
directory, *paths = json.load(sys.stdin)
model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
with torch.no_grad():
    logits = [torch.stack(model(torch.tensor([path]), output_router_logits=True).router_logits, 1) for path in paths]
numpy.savez(sys.argv[1], *[scores.numpy() for scores in logits])
"""


def own_choices(model: Path, paths: list[list[int]], directory: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Whether transformers chooses each expert, and whether clearly so: [positions, layers, experts] for each path."""
    need("transformers", find_spec("transformers") is not None)
    environment = {**os.environ, "PYTHONPATH": str(CPU_PATH), "HF_HUB_OFFLINE": "1"}
    asked, file = json.dumps([str(model), *paths]).encode(), directory / "scores.npz"
    subprocess.run([sys.executable, "-c", REFERENCE, str(file)], input=asked, check=True, env=environment)
    return [_choice(scores) for scores in np.load(file).values()]


def _choice(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ordered = np.sort(scores, axis=-1)
    last, next_one = ordered[..., -TOP_K, None], ordered[..., -TOP_K - 1, None]
    return scores >= last, np.broadcast_to(last - next_one > CLOSE, scores.shape)


async def test_recorded_experts_are_those_that_the_weights_choose(
    serve: Serve, mixture: Path, relay: tuple[Relay, str], tmp_path: Path
) -> None:
    stand = await serve(url=relay[1], model=mixture, routed_experts=True)
    first = (await stand.chat(user("hello"), max_tokens=40))["choices"][0]["message"]
    for sent in relay[0].events():  # a plain answer is one event
        assert "routed_experts" in sent["meta_info"]
    events = await stand.stream(user("hello"), first, user("go on"), max_tokens=40)
    assert len(events) > 2
    *early, last = relay[0].events()
    assert early and "routed_experts" in last["meta_info"]
    assert not [event for event in early if "routed_experts" in event["meta_info"]]
    await stand.chat(user("hello"), max_tokens=20, n=2)
    rows, known = stand.recorded(), dict[int, np.ndarray]()
    paths = [stand.path(index) for index in range(len(rows))]
    for row, path, (reference, sure) in zip(rows, paths, own_choices(mixture, paths, tmp_path), strict=True):
        experts = row.experts
        assert experts is not None and (experts.layers, experts.top_k, experts.width) == (SIZES.layers, TOP_K, 1)
        new = np.frombuffer(experts.ids, np.uint8).reshape(-1, SIZES.layers, TOP_K)
        before = known[row.prefix_of][: experts.start] if row.prefix_of is not None else new[:0]
        whole = known[row.id] = np.concatenate((before, new))
        assert len(whole) == len(path) - 1
        chosen = (whole[..., None] == np.arange(EXPERTS)).any(axis=-2)
        assert (chosen.sum(-1) == TOP_K).all() and sure.mean() > 0.9
        assert (chosen == reference[:-1])[sure[:-1]].all()
    assert [row.experts.start for row in rows[:2] if row.experts] == [0, len(paths[0]) - 1]


@pytest.fixture
async def relay(mixture_engine: Sglang) -> AsyncIterator[tuple[Relay, str]]:
    async with AsyncExitStack() as stack:
        app = web.Application()
        relay = Relay(mixture_engine.url)
        app.router.add_route("*", "/{path:.*}", relay.handle)
        yield relay, await listening(app, stack)


async def test_the_trainer_computes_what_the_engine_did_with_its_experts(
    serve: Serve, mixture: Path, mixture_engine: Sglang, recompute: "Recompute"
) -> None:
    stand = await serve(url=mixture_engine.url, model=mixture, routed_experts=True)
    messages = [user("hello")]
    for turn in range(3):
        answer = await stand.chat(*messages, max_tokens=80)
        messages += [answer["choices"][0]["message"], user(f"go on, {turn}")]
    await stand.chat(user("hello"), max_tokens=40, n=2)
    rows = stand.recorded()
    exact = recompute(mixture, rows, "replay")
    assert exact.gap < 1e-4 and exact.tokens == sum(len(row.sampled) for row in rows) > 100
    assert exact.routing["routing_replayed"] == 1 and exact.routing["routing_mismatch"] < 0.01
    # a control: with other experts, the same tokens have other logprobs, and every choice is a mismatch
    others = recompute(mixture, [replace(row, experts=_others(row.experts)) for row in rows], "replay")
    assert others.gap > 0.1 and others.routing["routing_mismatch"] > 0.5


def _others(experts: RoutedExperts | None) -> RoutedExperts | None:
    """Replace each expert by the next one."""
    return experts and replace(experts, ids=bytes((expert + 1) % EXPERTS for expert in experts.ids))


async def test_an_engine_without_the_flag_fails_the_call(serve: Serve, sglang_engine: Sglang, mixture: Path) -> None:
    stand = await serve(url=sglang_engine.url, model=mixture, routed_experts=True)
    answer = await stand.chat(user("hello"), max_tokens=5)
    assert (answer["status"], answer["error"]["code"]) == (502, "engine_no_experts")
    async with aiohttp.request("GET", f"{sglang_engine.url}/server_info") as info:
        assert (await info.json())["enable_hierarchical_cache"] is False  # the name by which such engines are refused
