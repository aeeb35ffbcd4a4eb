"""Hugging Face weights in and out of Megatron, and the model against transformers."""

import importlib.util
import json
import os
import resource
import subprocess
import sys
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from proxy.engine.sglang import CPU_PATH
from proxy.pool.errors import UserError
from proxy.pool.terminal.progress import MEGABYTE
from tests.conftest import need
from tests.trainer.make import FAMILIES, VOCABULARY, make_config, write_model
from trainer.config import Parallel
from trainer.config.model_shape import read_shape
from trainer.data.micro_batch import MicroBatch
from trainer.data.tree import TokenRun
from trainer.megatron.model.model import transformer_config
from trainer.megatron.mtp.weights import HEAD_TENSORS
from trainer.megatron.parallel import Ranks
from trainer.megatron.shards import write_tensors
from trainer.megatron.weights import load_weights
from trainer.policy import Policy

REFERENCE = """
import sys, torch
from transformers import AutoModelForCausalLM
for directory in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        torch.save([model(ids[None]).logits[0] for ids in torch.load(directory + "/ids.pt")], directory + "/logits.pt")
"""


def same_files(left: Path, right: Path) -> bool:
    first, second = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_come_back_bit_exact_with_their_files(family: str, ranks: Ranks, tmp_path: Path) -> None:
    source = write_model(tmp_path / "model", family)
    Policy(source, make_config(tmp_path), ranks).write_hf(tmp_path / "out")
    assert same_files(source, tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


@pytest.mark.parametrize("family", ["qwen3", "mimo"])
def test_a_config_names_the_type_of_the_policy_and_not_that_of_a_head_that_is_kept(
    family: str, ranks: Ranks, tmp_path: Path
) -> None:
    source, config = write_model(tmp_path / "model", family), make_config(tmp_path, parallel={"precision": "bfloat16"})
    Policy(source, config, ranks).write_hf(tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    types = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
    named = json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"]
    assert named == types["model.embed_tokens.weight"] == "bfloat16"
    assert {kind for name, kind in types.items() if name.startswith(HEAD_TENSORS)} <= {"float32"}


def test_loading_says_how_much_is_there(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_model(tmp_path / "model")
    loaded: list[float] = []
    model = Policy(source, make_config(tmp_path), ranks).model
    load_weights(model, source, loaded.append)
    assert sum(loaded) == pytest.approx(sum(param.nbytes for param in model.parameters()) / MEGABYTE)
    assert len(loaded) > 10


def test_weights_that_cannot_be_written_are_one_sentence(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"0.safetensors could not be written \(.*\); make room on its disk"):
            write_tensors(tmp_path, [("big", torch.zeros(100_000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_weights_over_the_size_of_a_file_are_several_with_an_index(tmp_path: Path) -> None:
    tensors = {str(number): torch.full((100,), float(number)) for number in range(5)} | {"big": torch.zeros(1000)}
    write_tensors(tmp_path, tensors.items(), limit=900)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = {
        path.name: sum(part.nbytes for part in load_file(path).values()) for path in tmp_path.glob("*.safetensors")
    }
    assert [sizes[f"model-0000{number}-of-00004.safetensors"] for number in (1, 2, 3, 4)] == [800, 800, 400, 4000]
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for name, tensor in tensors.items():
        assert torch.equal(load_file(tmp_path / index["weight_map"][name])[name], tensor)


def packed(sequences: list[torch.Tensor], device: torch.device) -> MicroBatch:
    tokens = torch.cat(sequences).to(device)
    positions = torch.cat([torch.arange(len(ids)) for ids in sequences]).to(device)
    ends = [0, *accumulate(len(ids) for ids in sequences)]
    runs = tuple(TokenRun(start, end, end, 0) for start, end in pairwise(ends))
    every = torch.arange(len(tokens))
    nodes, every = every.numpy(), every.to(device)
    return MicroBatch(tokens, positions, runs, every, tokens, every, nodes, (0, len(tokens)))


def test_logits_of_packed_sequences_equal_those_of_transformers(ranks: Ranks, tmp_path: Path) -> None:
    need("transformers", importlib.util.find_spec("transformers") is not None)
    sequences = [torch.randint(VOCABULARY, (length,)) for length in (90, 7, 33)]
    # transformers knows no MTP heads, and with them no mimo: they are compared in test_drafter.py
    sources = [
        write_model(tmp_path / family, family) for family in FAMILIES if family not in ("mimo", "qwen3_moe_head")
    ]
    for source in sources:
        torch.save(sequences, source / "ids.pt")
    environment = {**os.environ, "PYTHONPATH": str(CPU_PATH), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", REFERENCE, *map(str, sources)], check=True, env=environment)
    for source in sources:
        expected = torch.cat(torch.load(source / "logits.pt"))
        model = Policy(source, make_config(tmp_path), ranks).model
        logits = model.logits(packed(sequences, ranks.device)).detach().cpu()
        assert expected.abs().max() > 1 and (logits - expected).abs().max() < 1e-4, source.name


def test_a_missing_tensor_is_named(ranks: Ranks, tmp_path: Path) -> None:
    qwen2 = write_model(tmp_path / "other", "llama")
    source = write_model(tmp_path / "model")
    (qwen2 / "model.safetensors").rename(source / "model.safetensors")
    with pytest.raises(UserError, match="has no tensor model.layers.0.self_attn.q_norm.weight"):
        Policy(source, make_config(tmp_path), ranks)


def test_layers_that_do_not_divide_into_stages_are_refused(tmp_path: Path) -> None:
    shape = read_shape(write_model(tmp_path))
    with pytest.raises(UserError, match="parallel.pipeline = 3 does not divide the model's 2 layers; choose a divisor"):
        transformer_config(shape, torch.float32, Parallel(processes=3, pipeline=3))


@pytest.mark.parametrize(
    ("family", "parallel", "sentence"),
    [
        ("qwen3", {"expert": 2}, "parallel.expert = 2 divides experts, and qwen3 has none; set it to 1"),
        ("qwen3_moe", {"expert": 3}, "parallel.expert = 3 does not divide the model's 8 experts; choose a divisor"),
    ],
)
def test_experts_that_ranks_cannot_divide_are_refused(
    family: str, parallel: dict[str, int], sentence: str, tmp_path: Path
) -> None:
    shape = read_shape(write_model(tmp_path / "model", family))
    with pytest.raises(UserError, match=sentence):
        transformer_config(shape, torch.float32, msgspec.convert({"processes": 6} | parallel, Parallel))
