"""The shape of a model, from the config.json of its Hugging Face directory. Needs neither torch nor Megatron."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.pool.errors import UserError
from trainer.config import Parallel

FAMILIES = ("llama", "mimo", "qwen2", "qwen3", "qwen3_moe")


@dataclass(frozen=True)
class ExpertShape:
    """A mixture of experts in place of the feed-forward network of some layers."""

    count: int
    per_token: int
    ffn: int
    """Width of one expert."""
    normalised: bool
    """The weights of a token's experts are divided by their sum."""
    layers: tuple[bool, ...]
    """Which layers have experts; the others are dense."""


@dataclass(frozen=True)
class ModelShape:
    """What of the Hugging Face config the trainer needs."""

    family: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    tied: bool
    rope: dict[str, Any]
    experts: ExpertShape | None = None

    def token_ffn(self) -> float:
        """Width of the feed-forward network that one token passes through, the mean over the layers."""
        if self.experts is None:
            return self.ffn
        sparse = sum(self.experts.layers) / self.layers
        return sparse * self.experts.per_token * self.experts.ffn + (1 - sparse) * self.ffn


def read_shape(directory: Path) -> ModelShape:
    """The shape of the model in a Hugging Face directory; UserError when the trainer cannot build it."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); name a Hugging Face model directory") from error
    _check_family(config, path)
    try:
        shape = _shape(config)
    except KeyError as error:
        raise UserError(f"{path} lacks {error.args[0]}, which the trainer needs; add it to the file") from error
    _check_experts(shape.experts, path)
    return shape


def demand_splits(shape: ModelShape, parallel: Parallel) -> None:
    """UserError when the model's parts do not divide by the ranks that share it."""
    by_tensor = {"attention heads": shape.heads, "key-value heads": shape.kv_heads}
    by_tensor |= {"feed-forward units": shape.ffn, "vocabulary entries": shape.vocab}
    parts = [("tensor", parallel.tensor, by_tensor), ("pipeline", parallel.pipeline, {"layers": shape.layers})]
    for axis, ranks, counts in parts:
        for name, count in counts.items():
            if count % ranks:
                raise UserError(
                    f"parallel.{axis} = {ranks} does not divide the model's {count} {name}; choose a divisor"
                )
    _demand_expert_splits(shape, parallel)


def demand_served(shape: ModelShape, engines: Sequence[str]) -> None:
    """UserError when the engines could load the model but would serve something else."""
    if engines and shape.experts is not None and not all(shape.experts.layers):
        raise UserError(
            f"push.engines = {list(engines)} would serve random weights: {shape.experts.layers.count(False)} of the "
            f"model's {shape.layers} layers are dense, and SGLang's {shape.family} has experts in every layer; "
            "train a model without dense layers, or without engines"
        )


def _demand_expert_splits(shape: ModelShape, parallel: Parallel) -> None:
    if shape.experts is None:
        if parallel.expert > 1:
            raise UserError(
                f"parallel.expert = {parallel.expert} divides experts, and {shape.family} has none; set it to 1"
            )
        return
    if shape.experts.count % parallel.expert:
        raise UserError(
            f"parallel.expert = {parallel.expert} does not divide the model's {shape.experts.count} experts; choose a "
            "divisor"
        )


def _shape(config: dict[str, Any]) -> ModelShape:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    return ModelShape(
        family=config["model_type"],
        layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        context=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        tied=config.get("tie_word_embeddings", False),
        rope=rope,
        experts=_experts(config) if config["model_type"] == "qwen3_moe" else None,
    )


def _experts(config: dict[str, Any]) -> ExpertShape | None:
    """None when every layer is dense."""
    dense, each = config.get("mlp_only_layers") or [], config.get("decoder_sparse_step", 1)
    layers = tuple(layer not in dense and (layer + 1) % each == 0 for layer in range(config["num_hidden_layers"]))
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"  # transformers 5, and before
    if not any(layers) or config[name] == 0:
        return None
    return ExpertShape(
        count=config[name],
        per_token=config["num_experts_per_tok"],
        ffn=config["moe_intermediate_size"],
        normalised=config["norm_topk_prob"],
        layers=layers,
    )


def _check_experts(experts: ExpertShape | None, path: Path) -> None:
    if experts is None:
        return
    if not 1 <= experts.per_token <= experts.count:
        raise UserError(
            f"{path} sends a token to num_experts_per_tok = {experts.per_token} of {experts.count} experts; correct it"
        )
    if experts.normalised and experts.per_token == 1:
        raise UserError(
            f"{path} has norm_topk_prob with num_experts_per_tok = 1: the router's weight is always 1 and it could not "
            "learn; set norm_topk_prob to false"
        )


def _check_family(config: dict[str, Any], path: Path) -> None:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"{path} has model_type {family}; the trainer maps {', '.join(FAMILIES)}: use one of these")
    refused = {"mlp_bias": True, "use_sliding_window": True}
    if family not in ("qwen2", "mimo"):  # which have biases of q, k and v alone
        refused["attention_bias"] = True
    for key, value in refused.items():
        if config.get(key) == value:
            raise UserError(f"{path} has {key} = {value}, which the trainer does not map; use a model without it")
    if family == "qwen3_moe" and config.get("tie_word_embeddings"):
        raise UserError(
            f"{path} has tie_word_embeddings = true, and SGLang 0.5.23's {family} does not tie: its head would be "
            "random; write the embedding as lm_head.weight too and set it to false"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"{path} has rope type {kind}; the trainer knows default and llama3: use a model with these")
    if config.get("hidden_act") != "silu":
        raise UserError(f"{path} has hidden_act {config.get('hidden_act')}; the trainer knows silu: use such a model")
