"""The experts that the engine chose: recorded once per token, requested where they are not known, never invented."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.client import ServerDescription
from proxy.engine.engine_call import CallExperts, EngineError, Sampling, SamplingRequest
from proxy.engine.moe_config import Mixture
from proxy.engine.replicas.fleet import Fleet
from proxy.engine.replicas.replica import Origin
from proxy.engine.scripted import Fault, ScriptedReply, chosen
from proxy.engine.sglang import Sglang
from proxy.pool.completions.records import Completion, int_bytes
from proxy.pool.errors import UserError
from proxy.pool.inspect.verify import verify
from proxy.server import Gateway
from tests.proxy.conftest import SHELL, Serve, Stand, user

MIXTURE = Mixture(layers=3, top_k=2)


@pytest.fixture
def mixture(tiny_model: Path, tmp_path: Path) -> Path:
    """A directory that says it is a mixture; the scripted engine needs no weights."""
    directory = tmp_path / "mixture"
    shutil.copytree(tiny_model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": MIXTURE.layers, "num_experts_per_tok": MIXTURE.top_k}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


async def stand_for(serve: Serve, mixture: Path, script: Any, replicas: int = 1) -> Stand:
    stand = await serve(script, model=mixture, routed_experts=True, replicas=replicas)
    for engine in stand.replicas:
        engine.mixture = MIXTURE
    return stand


def expected(path: Sequence[int], item: Completion) -> bytes:
    """What the row must hold: the choices from its start up to its last sampled token."""
    assert item.experts is not None
    numbers = chosen(path, item.experts.start, MIXTURE)
    return bytes(int_bytes(numbers)[::4])


@pytest.mark.parametrize("streamed", [False, True])
async def test_every_row_holds_what_is_new_in_it(serve: Serve, mixture: Path, streamed: bool) -> None:
    stand = await stand_for(serve, mixture, lambda text, ids: ScriptedReply("a few words", tokens_per_event=2))
    messages = [user("hello")]
    for turn in range(3):
        if streamed:
            await stand.stream(*messages)
        else:
            await stand.chat(*messages)
        messages += [{"role": "assistant", "content": "a few words"}, user(f"and {turn}")]
    rows, known = stand.recorded(), 0
    for index, row in enumerate(rows):
        path = stand.path(index)
        assert row.experts is not None and row.experts.start == known and row.experts.end == len(path) - 1
        assert row.experts.ids == expected(path, row)
        known = len(path) - 1  # the choice for the last token comes with the next turn
    assert [row.prefix_length for row in rows] == [0, *(len(stand.path(index)) for index in range(2))]


async def test_answers_to_one_prompt_share_its_experts(serve: Serve, mixture: Path) -> None:
    stand = await stand_for(serve, mixture, lambda text, ids: "yes")
    await stand.chat(user("choose"), n=3)
    first, *others = stand.recorded()
    assert first.experts is not None and first.experts.start == 0
    for index, row in enumerate(others, 1):
        assert row.experts is not None and row.experts.start == row.prefix_length == first.prompt_length
        assert row.experts.ids == expected(stand.path(index), row)


async def test_another_gateway_goes_on_where_the_recorded_ones_end(serve: Serve, mixture: Path) -> None:
    turns = [user("hello"), {"role": "assistant", "content": "yes"}, user("more")]
    await (await stand_for(serve, mixture, lambda text, ids: "yes")).chat(turns[0])
    stand = await stand_for(serve, mixture, lambda text, ids: "yes")
    await stand.chat(*turns)
    before, row = stand.recorded()
    assert row.experts is not None and before.experts is not None and row.experts.start == before.experts.end > 0


async def test_what_was_lost_with_its_replica_is_asked_for_again(serve: Serve, mixture: Path) -> None:
    answers = iter([Fault(text="broken off here", after=3), "yes"])
    stand = await stand_for(serve, mixture, lambda text, ids: next(answers), replicas=2)
    await stand.chat(user("hello"))
    lost, row = stand.recorded()
    assert lost.experts is None and lost.untrainable is not None
    assert row.experts is not None and row.experts.start == 0 and row.experts.ids == expected(stand.path(1), row)


async def test_an_answer_of_several_engine_calls_has_all_experts(serve: Serve, mixture: Path) -> None:
    rest = '", "arguments": {"command": "ls"}}\n</tool_call>'
    stand = await stand_for(serve, mixture, lambda text, ids: rest if text.endswith("shell") else "hm</think>")
    await stand.chat(user("hello"), tools=[SHELL], tool_choice="required")
    [row] = stand.recorded()
    assert len(row.given) == 2 and row.experts is not None
    assert (row.experts.start, row.experts.end) == (0, len(stand.path()) - 1)
    assert row.experts.ids == expected(stand.path(), row)
    assert verify(stand.pool).damages == []


async def test_an_engine_that_names_none_fails_the_call(serve: Serve, mixture: Path) -> None:
    stand = await serve(lambda text, ids: "yes", model=mixture, routed_experts=True)
    answer = await stand.chat(user("hello"))
    assert (answer["status"], answer["error"]["code"]) == (502, "engine_no_experts")
    assert "--enable-return-routed-experts" in answer["error"]["message"]
    [row] = stand.recorded()
    assert row.experts is None and row.untrainable is not None and len(row.sampled) > 0


async def test_without_the_setting_nobody_asks(serve: Serve, mixture: Path) -> None:
    stand = await serve(lambda text, ids: "yes", model=mixture)
    assert stand.engine is not None
    stand.engine.mixture = MIXTURE
    await stand.chat(user("hello"))
    assert [row.experts for row in stand.recorded()] == [None]


Refused = Callable[[ProxyConfig, Path], object]
REFUSED: dict[str, tuple[Refused, str]] = {
    "a dense model": (lambda config, log: Gateway(config, "http://127.0.0.1:1"), "names no num_experts_per_tok; set"),
    "its engine": (lambda config, log: Sglang(config.engine, log), "names no num_experts_per_tok; set"),
    "a provider": (lambda config, log: Gateway(config, "litellm:openai/x"), "returns no experts; set it to false"),
}


def _config(model: Path, pool: Path, *arguments: str) -> ProxyConfig:
    return ProxyConfig(engine=EngineConfig(model=str(model), routed_experts=True, extra_args=arguments), pool=str(pool))


@pytest.mark.parametrize("case", REFUSED)
def test_models_without_experts_are_refused(case: str, tiny_model: Path, tmp_path: Path) -> None:
    refused, sentence = REFUSED[case]
    with pytest.raises(UserError, match=sentence):
        refused(_config(tiny_model, tmp_path / "pool.db"), tmp_path / "log")


def test_a_hierarchical_cache_is_refused_where_we_start_it(mixture: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="brings prefixes back without the experts"):
        Sglang(_config(mixture, tmp_path / "pool.db", "--enable-hierarchical-cache").engine, tmp_path / "log")


async def test_a_replica_with_a_hierarchical_cache_is_not_asked() -> None:
    fleet = Fleet(["http://127.0.0.1:9"])
    fleet.replicas[0].described(ServerDescription(ranks=1, stores=False, layered=True))
    route = fleet.route(Origin(1, None, 0))
    request = SamplingRequest(prompt=b"[1]", prompt_length=1, max_new_tokens=1)
    with pytest.raises(EngineError, match="start it without --enable-hierarchical-cache"):
        await anext(route.sample(request, Sampling(experts=CallExperts(Mixture(2, 2), 0))))
    await fleet.close()
