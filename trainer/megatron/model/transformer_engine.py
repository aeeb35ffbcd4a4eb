"""Transformer Engine's layers, for GPUs where it is installed: norm and linear layer in one kernel.

Its parameters have other names, and trainer/megatron/weights.py knows both; checkpoints are the same.
Left out: its attention, which cannot mask prefix trees; layers with experts, which are Megatron's own; fp8. No test
runs these layers, as that takes a GPU.
"""

from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.spec_utils import ModuleSpec

from trainer.megatron.device import has_gpu


def available() -> bool:
    """Whether there is a GPU with Transformer Engine installed for it."""
    return bool(gpt_layer_specs.HAVE_TE) and has_gpu()


def engine_spec(qk_layernorm: bool) -> ModuleSpec:
    """Megatron's spec of a dense layer: RMSNorm, attention and gated MLP."""
    return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_layernorm)
