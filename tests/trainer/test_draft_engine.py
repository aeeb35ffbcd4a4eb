"""The real SGLang drafts with an exported head, and a push brings it a better one."""

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from proxy.config import EngineConfig
from proxy.engine.sglang import Sglang
from proxy.engine.tiny_model import make_tiny_model
from tests.conftest import need
from tests.trainer.make import make_config, write_model
from trainer.config import Push
from trainer.data.row import TrainingRow
from trainer.loss.policy_loss import imitation
from trainer.megatron.mtp.weights import HEAD_TENSORS
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy
from trainer.push.push import push
from trainer.push.weights import Weights

LENGTH, WORDS = 40, 64
SPECULATE = (
    "--trust-remote-code --disable-overlap-schedule --disable-cuda-graph --speculative-algorithm NEXTN "
    "--prefill-attention-backend intel_amx --decode-attention-backend intel_amx "
    "--speculative-num-steps 2 --speculative-eagle-topk 1 --speculative-num-draft-tokens 3"
)
CONFIGURATION = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
"""MiMo brings its own, as transformers does not know it."""


def make_model(directory: Path) -> Path:
    """A random MiMo with the tokenizer of the tiny model."""
    make_tiny_model(directory / "tiny")
    source = write_model(directory / "model", "mimo")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(directory / "tiny" / name, source)
    config = json.loads((source / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}, "bos_token_id": None, "eos_token_id": 0}
    (source / "config.json").write_text(json.dumps(config))
    (source / "configuration_mimo.py").write_text(CONFIGURATION)
    return source


def learn(policy: Policy, steps: int) -> None:
    """Policy and head learn that each token has its successor, nine times of ten."""
    rng, follows = np.random.default_rng(0), np.random.default_rng(1).permutation(WORDS) + 10
    trained, nothing = np.arange(LENGTH) >= 1, np.zeros(LENGTH, dtype=np.float32)
    for _ in range(steps):
        tokens = rng.integers(0, WORDS, (32, LENGTH)) + 10
        for at in range(1, LENGTH):
            known = rng.random(len(tokens)) < 0.9
            tokens[known, at] = follows[tokens[known, at - 1] - 10]
        rows = [TrainingRow(row, trained, nothing, nothing, np.zeros(LENGTH, dtype=np.int64)) for row in tokens]
        policy.update([rows], len(rows) * (LENGTH - 1), imitation, 1e-2)


def with_noise(source: Path, target: Path) -> Path:
    """The same model with a head that has learned nothing."""
    shutil.copytree(source, target)
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(source / "model.safetensors")
    for name in (name for name in tensors if name.startswith(HEAD_TENSORS) and tensors[name].ndim == 2):
        tensors[name] = 0.2 * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


@pytest.fixture
def engine(tmp_path: Path, ranks: Ranks) -> Iterator[Sglang]:
    """SGLang with a model that has learned and a head that has not; with its own head it stands at tmp_path/learned."""
    need("sglang", find_spec("sglang") is not None)
    options = {"optimizer": {"lr": 1e-2}, "mtp": {"drafts": 2}}
    policy = Policy(make_model(tmp_path), make_config(tmp_path, **options), ranks)
    learn(policy, 150)
    policy.write_hf(tmp_path / "learned")
    served = with_noise(tmp_path / "learned", tmp_path / "served")
    config = EngineConfig(model=str(served), dtype="float32", extra_args=tuple(SPECULATE.split()))
    server = Sglang(config, tmp_path / "engine.log")
    try:
        server.wait_healthy()
        yield server
    finally:
        server.stop()


def generate(url: str) -> list[dict[str, Any]]:
    prompts = np.random.default_rng(5).integers(10, 10 + WORDS, (4, 6)).tolist()
    sampling = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    body = json.dumps({"input_ids": prompts, "sampling_params": sampling}).encode()
    with urlopen(Request(f"{url}/generate", body, {"content-type": "application/json"}), timeout=300) as answer:
        return msgspec.json.decode(answer.read(), type=list[dict[str, Any]])


@pytest.mark.long
def test_the_engine_drafts_with_the_exported_head_and_a_push_brings_it_a_better_one(
    engine: Sglang, tmp_path: Path
) -> None:
    """Both answer alike, as drafts are only accepted where the policy says the same; they differ in how many are."""
    before = generate(engine.url)
    push(Weights("v1", tmp_path / "learned"), Push(engines=(engine.url,), timeout_seconds=300))
    after = generate(engine.url)
    assert [one["output_ids"] for one in before] == [one["output_ids"] for one in after]
    lengths = [np.mean([one["meta_info"]["spec_accept_length"] for one in replies]) for replies in (before, after)]
    assert lengths[0] < 1.5 and lengths[1] > 2.5
    for one in (*before, *after):  # as the proxy adds it up for /health
        meta = one["meta_info"]
        assert meta["completion_tokens"] / meta["spec_verify_ct"] == pytest.approx(meta["spec_accept_length"])
