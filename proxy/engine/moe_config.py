"""The sizes of a mixture of experts that are needed to read which experts an engine chose (`engine.routed_experts`).

Left out: which layers are mixtures. SGLang 0.5.23 names experts for every layer; for dense ones, expert 0.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from proxy.pool.errors import UserError

LAYERED = ("--enable-hierarchical-cache", "--enable-hicache")


@dataclass(frozen=True)
class Mixture:
    """The sizes of one model."""

    layers: int
    """All layers, dense ones as well."""
    top_k: int
    """Experts per token and layer."""


class _Sizes(msgspec.Struct):
    num_hidden_layers: int | None = None
    num_experts_per_tok: int | None = None


class _ModelConfig(_Sizes):
    text_config: _Sizes = msgspec.field(default_factory=_Sizes)


def read_mixture(model: Path) -> Mixture:
    """Read the sizes from the model directory; UserError when it has no mixture of experts."""
    file = model / "config.json"
    try:
        config = msgspec.json.decode(file.read_bytes(), type=_ModelConfig)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{file} cannot be read ({error}); name a model in Hugging Face format") from error
    for sizes in (config, config.text_config):
        if sizes.num_hidden_layers and sizes.num_experts_per_tok:
            return Mixture(sizes.num_hidden_layers, sizes.num_experts_per_tok)
    raise UserError(
        f"engine.routed_experts = true needs a mixture of experts, and {file} names no num_experts_per_tok; "
        "set engine.routed_experts = false"
    )


def layered_cache(where: str) -> str:
    """The error message for an engine with a hierarchical cache, which loses the experts of cached prefixes."""
    return (
        f"{where} has a hierarchical cache, which brings prefixes back without the experts that were chosen for them; "
        f"start it without {LAYERED[0]}, or set engine.routed_experts = false"
    )
