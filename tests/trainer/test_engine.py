"""Against the real SGLang: a push lands by whatever way, and both sides then compute the same logprobs."""

import json
from array import array
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen
from zlib import crc32

import numpy as np
import pytest

from proxy.config import EngineConfig
from proxy.engine.sglang import Sglang
from proxy.engine.tiny_model import make_tiny_model
from proxy.pool.completions.records import NewCompletion, VersionSpan, int_bytes
from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row
from proxy.pool.rollouts import runs
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.schema import completions
from proxy.pool.training import steps
from tests.conftest import need
from tests.trainer.hugging import transformers_gap
from tests.trainer.make import make_config, make_push
from trainer.commands.logprobs import compare_logprobs
from trainer.commands.recorded_rows import sampled_by
from trainer.config import Config, Push
from trainer.loop import resume, train
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy
from trainer.push.push import push, push_again, release
from trainer.push.target import PushTarget
from trainer.push.weights import Weights
from trainer.run_state import RunState

PROMPTS, SAMPLED = 8, 160


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    make_tiny_model(directory := tmp_path_factory.mktemp("tiny") / "model")
    return directory


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Sglang]:
    """A real server with the tiny model."""
    need("sglang", find_spec("sglang") is not None)
    server = Sglang(EngineConfig(model=str(tiny), dtype="float32"), tiny.parent / "engine.log")
    try:
        server.wait_healthy()
        yield server
    finally:
        server.stop()


def generate(url: str, prompts: list[list[int]]) -> list[dict[str, Any]]:
    sampling = {"temperature": 1.0, "max_new_tokens": SAMPLED, "ignore_eos": True}
    body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
    request = Request(url + "/generate", json.dumps(body).encode(), {"content-type": "application/json"})
    with urlopen(request, timeout=300) as answer:
        return json.loads(answer.read())


def record(pool: Pool, run_id: int, url: str) -> None:
    """Groups of two rollouts, sampled from the engine; one of each is rewarded."""
    prompts = np.random.default_rng(0).integers(10, 1900, (PROMPTS, 100)).tolist()
    members = [member for _ in range(PROMPTS // 2) for member in open_group(pool, run_id, {"id": "t"}, 2)]
    for member, prompt, answer in zip(members, prompts, generate(url, prompts), strict=True):
        attempt, _ = open_attempt(pool, member.rollout_id, "command")
        row = to_row(completion(attempt.id, prompt, answer)) | {"ordinal": 0}
        with pool.write() as connection:
            insert_row(connection, completions, row)
        finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=float(member.member)))


def completion(attempt_id: int, prompt: list[int], answer: dict[str, Any]) -> NewCompletion:
    meta = answer["meta_info"]
    return NewCompletion(
        attempt_id=attempt_id,
        prompt_tail=array("i", prompt),
        sampled=array("i", answer["output_ids"]),
        logprobs=array("f", [entry[0] for entry in meta["output_token_logprobs"]]),
        versions=tuple(VersionSpan(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]),
        finish_reason="length",
        reply={},
        path_crc=crc32(int_bytes([*prompt, *answer["output_ids"]])),
        started_at=0,
        finished_at=1,
    )


def test_engine_and_trainer_agree_after_a_push(
    engine: Sglang, tiny: Path, pool: Pool, ranks: Ranks, tmp_path: Path
) -> None:
    push_to = Push(engines=(engine.url,), way="distributed")
    config: Config = make_config(tmp_path, model=str(tiny), push=push_to, steps=1, optimizer={"lr": 3e-3})
    with RunState(config, ranks) as state:
        resume(config, Policy(Path(config.model), config, ranks), state)
    run = runs.find_run(pool, config.run)
    record(pool, run.id, engine.url)
    first = compare_logprobs(config, ranks, config.run)
    train(config, ranks)
    evaluation = runs.open_run(pool, "after", "eval", {})
    record(pool, evaluation.id, engine.url)
    second = compare_logprobs(config, ranks, "after")
    newest = steps.latest(pool, run.id)
    assert newest is not None and newest.step == 1 and second["policy_version"] == newest.name
    assert second["logprob_tokens_compared"] == PROMPTS * SAMPLED
    assert max(first["max_abs_logprob_diff"], second["max_abs_logprob_diff"]) <= 1e-4
    sampled = sampled_by(newest.name, config, "after", Counter())
    assert transformers_gap(Path(newest.hf_dir), sampled) <= 1e-4
    learned = steps.metrics(pool, run.id)[-1]
    assert learned["clip_fraction"] == 0 and abs(learned["ratio_mean"] - 1) < 1e-4  # on policy: every ratio is 1


def test_every_way_brings_the_same_weights(engine: Sglang, tiny: Path, tmp_path: Path) -> None:
    """In buckets of a few tensors, and while calls are in flight."""
    make_tiny_model(tmp_path / "other", seed=1)
    checksums = []
    for number, way in enumerate(("disk", "tensor", "distributed")):
        options = make_push(engines=(engine.url,), way=way, bucket_bytes=1 << 19)  # type: ignore[arg-type]
        push(Weights(f"before-{way}", tiny), options)
        old = PushTarget(engine.url, options).checksums()
        with ThreadPoolExecutor(1) as thread:
            call = thread.submit(generate, engine.url, [list(range(100 + number, 150 + number))])
            done = push(Weights(f"after-{way}", tmp_path / "other"), options)
        assert done.ways == {engine.url: way} and done.failed == {}
        (answer,) = call.result()
        assert {span["version"] for span in answer["meta_info"]["weight_versions"]} <= {f"before-{way}", f"after-{way}"}
        assert PushTarget(engine.url, options).served() == f"after-{way}"
        checksums.append((old, PushTarget(engine.url, options).checksums()))
    assert len(set(checksums)) == 1 and checksums[0][0] != checksums[0][1]


def test_an_engine_gives_up_its_memory_for_a_step_and_serves_again_after_the_push(engine: Sglang, tiny: Path) -> None:
    """The order of calls is what the real scheduler survives; on the CPU no memory is given up."""
    options = Push(engines=(engine.url,), colocated=True)
    for number in range(2):
        release(options)
        assert PushTarget(engine.url, options).served().endswith("-released")
        push(Weights(f"shared-{number}", tiny), options)
        (answer,) = generate(engine.url, [list(range(200, 250))])
        assert answer["meta_info"]["weight_version"] == f"shared-{number}"


def test_the_calls_of_an_engine_that_failed_end_and_a_push_brings_it_back(engine: Sglang, tiny: Path) -> None:
    options = Push(engines=(engine.url,))
    failed = PushTarget(engine.url, options)
    sampling = {"temperature": 1.0, "max_new_tokens": 8000, "ignore_eos": True}
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": sampling, "stream": True}).encode()
    with urlopen(Request(engine.url + "/generate", body, {"content-type": "application/json"}), timeout=300) as events:
        assert events.readline().startswith(b"data: {")
        failed.pause()
        failed.name("v9-loading")
        failed.abandon()
        *_, last = (line for line in events if line.startswith(b"data: {"))
    assert json.loads(last[6:])["meta_info"]["finish_reason"]["type"] == "abort"
    again = push_again(Weights("v9", tiny), options)
    assert again is not None and again.ways == {engine.url: "disk"}
    assert generate(engine.url, [[1, 2, 3]])[0]["meta_info"]["weight_version"] == "v9"
