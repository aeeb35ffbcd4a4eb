"""Models of random weights in the shapes of real ones, and policies of them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu_stages.scene import Scene
from trainer.config import Config, Parallel
from trainer.config.model_shape import read_shape

if TYPE_CHECKING:
    from trainer.megatron.model.model import PolicyModel
    from trainer.megatron.parallel import Ranks
    from trainer.policy import Policy

SHARD_BYTES = 4 * 10**9


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A Qwen3, with experts in every layer where `experts` is not 0."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    vocabulary: int = 151_936
    experts: int = 0
    per_token: int = 0
    expert_ffn: int = 0

    def with_layers(self, layers: int) -> "Sizes":
        return replace(self, layers=layers)


QWEN3_1_7B = Sizes(hidden=2048, layers=28, ffn=6144, heads=16, kv_heads=8)
QWEN3_4B = Sizes(hidden=2560, layers=36, ffn=9728, heads=32, kv_heads=8)
QWEN3_30B_A3B = Sizes(hidden=2048, layers=48, ffn=6144, heads=32, kv_heads=4, experts=128, per_token=8, expert_ffn=768)
DENSE_SMALL = Sizes(hidden=64, layers=2, ffn=128, heads=4, kv_heads=2, head_dim=16, vocabulary=2048)
MIXED_SMALL = replace(DENSE_SMALL, experts=8, per_token=2, expert_ffn=32)


def hf_config(sizes: Sizes) -> dict[str, Any]:
    """The config.json of a model of these sizes."""
    config = {
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": sizes.hidden,
        "intermediate_size": sizes.ffn, "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads, "head_dim": sizes.head_dim, "vocab_size": sizes.vocabulary,
        "max_position_embeddings": 262_144, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "tie_word_embeddings": not sizes.experts, "torch_dtype": "bfloat16", "attention_bias": False,
    }  # fmt: skip
    if sizes.experts:
        config |= {
            "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.per_token, "moe_intermediate_size": sizes.expert_ffn, "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    return config


def shapes(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The name and shape of each tensor."""
    yield "model.embed_tokens.weight", (sizes.vocabulary, sizes.hidden)
    yield "model.norm.weight", (sizes.hidden,)
    if sizes.experts:
        yield "lm_head.weight", (sizes.vocabulary, sizes.hidden)
    for layer in range(sizes.layers):
        for name, shape in layer_shapes(sizes):
            yield f"model.layers.{layer}.{name}", shape


def layer_shapes(sizes: Sizes) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The same within a layer."""
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    for part, width in (("q", queries), ("k", keys), ("v", keys)):
        yield f"self_attn.{part}_proj.weight", (width, sizes.hidden)
    yield "self_attn.o_proj.weight", (sizes.hidden, queries)
    yield from ((f"self_attn.{part}_norm.weight", (sizes.head_dim,)) for part in "qk")
    yield from ((f"{part}_layernorm.weight", (sizes.hidden,)) for part in ("input", "post_attention"))
    if sizes.experts:
        yield "mlp.gate.weight", (sizes.experts, sizes.hidden)
    owners = [f"mlp.experts.{number}" for number in range(sizes.experts)] or ["mlp"]
    width = sizes.expert_ffn or sizes.ffn
    for owner in owners:
        yield from ((f"{owner}.{part}_proj.weight", (width, sizes.hidden)) for part in ("gate", "up"))
        yield f"{owner}.down_proj.weight", (sizes.hidden, width)


def write_model(scene: Scene, sizes: Sizes) -> Path:
    """Write random bf16 weights in Hugging Face's format, in files of some gigabytes. Drawn on the scene's device."""
    directory = scene.directory / f"model-{len(list(scene.directory.glob('model-*')))}"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(hf_config(sizes)))
    generator = torch.Generator(scene.device).manual_seed(0)
    files: list[dict[str, Tensor]] = [{}]
    shard_bytes = 0
    for name, shape in shapes(sizes):
        if shard_bytes > SHARD_BYTES:
            _write(directory, files)
            files.append({})
            shard_bytes = 0
        noise = torch.randn(shape, generator=generator, device=scene.device, dtype=torch.bfloat16)
        files[-1][name] = (torch.ones_like(noise) if len(shape) == 1 else noise * 0.02).cpu()
        shard_bytes += 2 * noise.numel()
    _write(directory, files)
    return directory


def _write(directory: Path, files: list[dict[str, Tensor]]) -> None:
    save_file(files[-1], str(directory / f"{len(files):03d}.safetensors"), metadata={"format": "pt"})
    files[-1] = {}


def make_config(
    scene: Scene, model: Path, *, precision: Literal["float32", "bfloat16"] = "bfloat16", **parallel: Any
) -> Config:
    """A configuration for this model, with all that it writes in the stage's directory."""
    here = str(scene.directory)
    options = Parallel(precision=precision, **parallel)
    return Config(pool=f"{here}/pool.db", run="benchmark", model=str(model), output=f"{here}/out", parallel=options)


def make_policy(scene: Scene, ranks: "Ranks", model: Path, **options: Any) -> "Policy":
    """A policy of this model; `options` as for `make_config`."""
    from trainer.policy import Policy  # megatron-core may be missing

    return Policy(model, make_config(scene, model, **options), ranks)


def load_model(scene: Scene, directory: Path, dtype: torch.dtype) -> "PolicyModel":
    """The model alone, without an optimizer."""
    from trainer.megatron.model.model import build_model, transformer_config
    from trainer.megatron.weights import load_weights

    shape, parallel = read_shape(directory), Parallel()
    model = build_model(shape, transformer_config(shape, dtype, parallel), parallel).to(scene.device, dtype)
    load_weights(model, directory)
    return model
