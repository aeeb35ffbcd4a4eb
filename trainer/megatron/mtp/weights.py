"""The MTP head's weights between Hugging Face directories and Megatron's modules, under the names of SGLang's draft
models.

MiMo: model.mtp_layers.0.* (srt/models/mimo_mtp.py). Qwen3-MoE: mtp.* (srt/models/qwen3_moe_mtp.py). Both have one
layer. Left out: formats with several layers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainer.megatron.model.model import PolicyModel
from trainer.megatron.mtp.head import MTPHead
from trainer.megatron.weights import ExportExtras, SafetensorsReader, export_parameter, load_parameter, own_name


@dataclass(frozen=True)
class HeadNaming:
    """How a model family names the tensors of its head."""

    block: str
    """Prefix of the layer's tensors. Behind it, names are those of a decoder layer."""
    own: Mapping[str, str]
    """The head's other parameters -> the tensors that hold them."""
    hidden_first: bool
    """Whether the input projection takes the hidden state first, then the embedding."""
    masks_first: bool
    """Whether the embedding is zero at position 0."""


HEAD_NAMINGS = {
    "mimo": HeadNaming(
        block="model.mtp_layers.0.",
        own={
            name: f"model.mtp_layers.0.{name}"
            for name in (
                "token_layernorm.weight",
                "hidden_layernorm.weight",
                "input_proj.weight",
                "final_layernorm.weight",
            )
        },
        hidden_first=True,
        masks_first=True,
    ),
    "qwen3_moe": HeadNaming(
        block="mtp.layers.0.",
        own={
            "token_layernorm.weight": "mtp.pre_fc_norm_embedding.weight",
            "hidden_layernorm.weight": "mtp.pre_fc_norm_hidden.weight",
            "input_proj.weight": "mtp.fc.weight",
            "final_layernorm.weight": "mtp.norm.weight",
        },
        hidden_first=False,
        masks_first=False,
    ),
}
HEAD_TENSORS = ("model.mtp_layers.", "mtp.")
"""Prefixes of a head's tensors in all families."""
_BLOCK, _LAYER = "block.", "decoder.layers.0."


@torch.no_grad()
def load_head(head: MTPHead, model: PolicyModel, directory: Path, layout: HeadNaming) -> None:
    """Fill the head from a directory, or from the policy's last layer where the directory has no head."""
    tensors = SafetensorsReader(directory)
    if layout.own["input_proj.weight"] not in tensors.file_of:
        head.copy_last_layer(model)
        return

    def read(name: str) -> Tensor:
        return tensors.read(name.replace("model.layers.0.", layout.block, 1))

    for name, param in head.named_parameters():
        if name.startswith(_BLOCK):
            load_parameter(_global(name, head), param, read, head.config)
        else:
            param.copy_(_turned(name, tensors.read(layout.own[name]), layout))


def export_head(head: MTPHead, layout: HeadNaming) -> ExportExtras:
    """The head's tensors and config entries, to be exported with the policy."""
    return ExportExtras(_tensors(head, layout), {"num_nextn_predict_layers": 1})


def _tensors(head: MTPHead, layout: HeadNaming) -> Iterator[tuple[str, Tensor]]:
    for name, param in head.named_parameters():
        if name.startswith(_BLOCK):
            for hf_name, part in export_parameter(_global(name, head), param, head.config):
                yield hf_name.replace("model.layers.0.", layout.block, 1), part
        else:
            yield layout.own[name], _turned(name, param.data.cpu(), layout).contiguous()


def _global(name: str, head: MTPHead) -> str:
    """The name that a parameter of the block would have in the model's first layer."""
    return own_name(name.replace(_BLOCK, _LAYER, 1), head.config)


def _turned(name: str, tensor: Tensor, layout: HeadNaming) -> Tensor:
    """Swap the halves of the input projection where the family has them the other way round; its own inverse."""
    if name != "input_proj.weight" or layout.hidden_first:
        return tensor
    return torch.cat(tensor.chunk(2, dim=1)[::-1], dim=1)


def kept_head(directory: Path) -> ExportExtras:
    """The unchanged head of a directory, for exports of a policy that is trained without its head."""
    tensors = SafetensorsReader(directory)
    return ExportExtras((name, tensors.read(name)) for name in tensors.file_of if name.startswith(HEAD_TENSORS))
