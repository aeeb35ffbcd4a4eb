"""Small models, rows and recorded groups for the tests of the trainer."""

import json
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from proxy.pool.completions.records import Completion, NewCompletion, VersionSpan, int_bytes
from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row
from proxy.pool.rollouts.attempts import open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.schema import completions
from trainer.config import Config, Push
from trainer.data.row import TrainingRow

VOCABULARY, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 96, 32, 64, 4, 2, 16, 2
"""Heads are of 16 numbers, the fewest that FlexAttention takes on a GPU. The qwen2 model has fewer heads than HEADS."""
EXPERTS, EXPERT_FFN = 8, 16


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Skip a test on a machine with a GPU, where it cannot hold for this reason."""
    return pytest.mark.skipif(torch.cuda.is_available(), reason=reason)


LLAMA_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": EXPERT_FFN,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
HEADS_OF = {
    "mimo": (
        "model.mtp_layers.0",
        [f"model.mtp_layers.0.{name}_layernorm.weight" for name in ("token", "hidden", "final")]
        + ["model.mtp_layers.0.input_proj.weight"],
    ),
    "qwen3_moe": (
        "mtp.layers.0",
        ["mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight", "mtp.fc.weight"],
    ),
}
"""Of MTP heads: the prefix of the layer, and the other tensors, the input projection last."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False},
    "qwen2": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "num_attention_heads": HIDDEN // HEAD_DIM,  # SGLang 0.5.23 reads no head_dim for this family, nor for mimo
    },
    "mimo": {
        "model_type": "mimo",
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "num_attention_heads": HIDDEN // HEAD_DIM,
        "num_nextn_predict_layers": 1,
    },
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_scaling": LLAMA_ROPE},
    "qwen3_moe": MOE,
    "qwen3_moe_head": MOE | {"num_nextn_predict_layers": 1},
    "qwen3_moe_mixed": MOE | {"norm_topk_prob": False, "decoder_sparse_step": 2},
}


def write_model(directory: Path, family: str = "qwen3", seed: int = 0) -> Path:
    """A random model in Hugging Face format. Weights are large, so that masks and positions matter."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **FAMILIES[family],
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: draw(name, shape, generator) for name, shape in shapes(config).items()}
    save_file(tensors, str(directory / "model.safetensors"), metadata={"format": "pt"})
    return directory


def draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=generator)
    return 1 + 0.1 * noise if name.endswith("norm.weight") else 0.2 * noise


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    queries, keys = config["num_attention_heads"] * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    layers = {f"model.layers.{layer}": layer for layer in range(LAYERS)}
    if config.get("num_nextn_predict_layers"):
        prefix, own = HEADS_OF[config["model_type"]]
        layers[prefix] = 0  # is made like the first one
        shapes |= dict.fromkeys(own[:-1], (HIDDEN,)) | {own[-1]: (HIDDEN, 2 * HIDDEN)}
    for name, layer in layers.items():
        attention = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        parts: dict[str, tuple[int, ...]]
        parts = {f"self_attn.{part}.weight": (size, HIDDEN) for part, size in attention.items()}
        parts |= {"self_attn.o_proj.weight": (HIDDEN, queries)}
        if config["model_type"] == "qwen3_moe" and (layer + 1) % config["decoder_sparse_step"] == 0:
            parts |= {"mlp.gate.weight": (EXPERTS, HIDDEN)}
            for expert in range(EXPERTS):
                parts |= feed_forward(f"mlp.experts.{expert}", EXPERT_FFN)
        else:
            parts |= feed_forward("mlp", FFN)
        norms = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
        if config["model_type"].startswith("qwen3"):
            norms |= {"self_attn.q_norm.weight": (HEAD_DIM,), "self_attn.k_norm.weight": (HEAD_DIM,)}
        if config["model_type"] in ("qwen2", "mimo"):
            norms |= {f"self_attn.{part}.bias": (size,) for part, size in attention.items()}
        shapes |= {f"{name}.{part}": shape for part, shape in {**parts, **norms}.items()}
    return shapes


def feed_forward(name: str, width: int) -> dict[str, tuple[int, ...]]:
    parts: dict[str, tuple[int, ...]] = {f"{name}.{part}.weight": (width, HIDDEN) for part in ("gate_proj", "up_proj")}
    return parts | {f"{name}.down_proj.weight": (HIDDEN, width)}


def make_config(directory: Path, **changes: Any) -> Config:
    """A configuration with everything under `directory`."""
    options: dict[str, Any] = {
        "pool": str(directory / "pool.db"),
        "run": "demo",
        "model": str(directory / "model"),
        "output": str(directory / "trainer"),
        "batch": {"groups": 2, "max_staleness": 100, "patience_seconds": 60},
        "optimizer": {"lr": 1e-2},
    }
    sections = {name: value for name, value in changes.items() if isinstance(value, msgspec.Struct)}
    changes = {name: value for name, value in changes.items() if name not in sections}
    return msgspec.structs.replace(msgspec.convert(options | changes, Config), **sections)


def make_push(
    *, tries: int = Push.TRIES, bucket_bytes: int = Push.BUCKET_BYTES, answer_seconds: float = Push.ANSWER_SECONDS,
    patience_seconds: float = Push.PATIENCE_SECONDS, **fields: Any,
) -> Push:  # fmt: skip
    """Push settings with other constants than users have."""

    class OtherPush(Push, frozen=True, kw_only=True):
        TRIES = tries
        BUCKET_BYTES = bucket_bytes
        ANSWER_SECONDS = answer_seconds
        PATIENCE_SECONDS = patience_seconds

    return OtherPush(**fields)


def make_row(rng: np.random.Generator, length: int, trained: int) -> TrainingRow:
    """A random sequence whose last `trained` tokens are trained."""
    mask = np.arange(length) >= length - trained
    logp = np.where(mask, rng.uniform(-5, -3, length), 0).astype(np.float32)
    advantage = np.full(length, rng.standard_normal(), dtype=np.float32)
    return TrainingRow(rng.integers(0, VOCABULARY, length), mask, logp, advantage, np.zeros(length, dtype=np.int64))


def make_rows(count: int, seed: int = 0) -> list[TrainingRow]:
    rng = np.random.default_rng(seed)
    return [make_row(rng, int(rng.integers(8, 40)), 5) for _ in range(count)]


def chain(paths: Sequence[tuple[Sequence[int], Sequence[int]]], attempt_id: int = 1) -> list[Completion]:
    """Completions of one attempt from (prompt, sampled) pairs, each stored against the one before."""
    chain: list[Completion] = []
    before: list[int] = []
    for index, (prompt, sampled) in enumerate(paths):
        shared = next(
            (i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), min(len(before), len(prompt))
        )
        new = new_completion(attempt_id, list(prompt[shared:]), list(sampled), "v1")
        path = [*prompt, *sampled]
        link = {"prefix_of": index, "prefix_length": shared} if index else {"prompt_tail": array("i", prompt)}
        fields = {**vars(new), "id": index + 1, "ordinal": index, "path_crc": crc32(int_bytes(path)), **link}
        chain.append(Completion(**fields))
        before = path
    return chain


def new_completion(attempt_id: int, prompt: list[int], sampled: list[int], version: str) -> NewCompletion:
    logprobs = [-0.5 - (token % 7) / 4 for token in sampled]
    return NewCompletion(
        attempt_id=attempt_id,
        prompt_tail=array("i", prompt),
        sampled=array("i", sampled),
        logprobs=array("f", logprobs),
        versions=(VersionSpan(version, 0, len(sampled)),),
        finish_reason="stop",
        reply={"role": "assistant", "content": ""},
        path_crc=crc32(int_bytes([*prompt, *sampled])),
        started_at=0,
        finished_at=1,
    )


def fill(pool: Pool, run_id: int, groups: int, version: str = "v1", size: int = 4) -> None:
    """Finished groups of rollouts with one completion each; half of a group's rewards are 1."""
    rng = random.Random(0)
    for _ in range(groups):
        for member in open_group(pool, run_id, {"id": "t", "domain": "agent"}, size):
            attempt, _ = open_attempt(pool, member.rollout_id, "command")
            prompt, sampled = ([rng.randrange(VOCABULARY) for _ in range(count)] for count in (20, 8))
            row = to_row(new_completion(attempt.id, prompt, sampled, version)) | {"ordinal": 0}
            with pool.write() as connection:
                insert_row(connection, completions, row)
            finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=float(member.member % 2)))
