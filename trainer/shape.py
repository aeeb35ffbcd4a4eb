"""The shape of a model, from the config.json of its Hugging Face directory. Needs neither torch nor Megatron."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy.pool.errors import UserError

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True)
class Shape:
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


def read_shape(directory: Path) -> Shape:
    """The shape of the model in a Hugging Face directory; UserError when the trainer cannot build it."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); name a Hugging Face model directory") from error
    _check_family(config, path)
    try:
        return _shape(config)
    except KeyError as error:
        raise UserError(f"{path} lacks {error.args[0]}, which the trainer needs; add it to the file") from error


def _shape(config: dict[str, Any]) -> Shape:
    heads = config["num_attention_heads"]
    rope = config.get("rope_parameters") or {**(config.get("rope_scaling") or {}), "rope_theta": config["rope_theta"]}
    return Shape(
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
    )


def _check_family(config: dict[str, Any], path: Path) -> None:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"{path} has model_type {family}; the trainer maps {', '.join(FAMILIES)}: use one of these")
    refused = {"mlp_bias": True, "use_sliding_window": True}
    if family != "qwen2":
        refused["attention_bias"] = True
    for key, value in refused.items():
        if config.get(key) == value:
            raise UserError(f"{path} has {key} = {value}, which the trainer does not map; use a model without it")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UserError(f"{path} has rope type {kind}; the trainer knows default and llama3: use a model with these")
    if config.get("hidden_act") != "silu":
        raise UserError(f"{path} has hidden_act {config.get('hidden_act')}; the trainer knows silu: use such a model")
