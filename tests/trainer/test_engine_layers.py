"""Transformer Engine's layers have other names for the same weights: in files of Hugging Face and in checkpoints.

Not covered: the layers themselves, which need a GPU.
"""

from pathlib import Path

from tests.trainer.make import make_config, write_model
from trainer.megatron.model import transformer_engine
from trainer.megatron.parallel import Ranks
from trainer.megatron.weights import _hf_names
from trainer.policy import Policy

FUSED = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def fused(name: str) -> str:
    """The name of a weight in Transformer Engine's layer."""
    for own, theirs in FUSED.items():
        name = name.replace(own, theirs)
    return name


def test_both_kinds_of_layers_have_the_same_files_and_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    model = Policy(write_model(tmp_path / "model"), make_config(tmp_path), ranks).model
    names = [name for name, _ in model.named_parameters()]
    renamed = [fused(name) for name in names]
    assert sum(a != b for a, b in zip(names, renamed, strict=True)) == 2 * len(model.decoder.layers)
    assert [_hf_names(name) for name in renamed] == [_hf_names(name) for name in names]
    stored = {tensor.key for name, tensor in model.sharded_state_dict().items() if name in names}
    assert stored == {name.replace(".layers.0.", ".layers.").replace(".layers.1.", ".layers.") for name in renamed}


def test_without_a_gpu_the_layers_are_megatrons_own() -> None:
    assert not transformer_engine.available()
