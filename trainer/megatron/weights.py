"""Weights between Hugging Face safetensors and Megatron's modules: bit-exact in both directions, for any split.

Megatron's layout differs from Hugging Face's in three ways: q, k and v are one matrix with rows grouped by key-value
head; the gate and up projections are one matrix; tensor, expert and pipeline ranks hold parts. `write_model` leaves a
complete directory (config, tokenizer, weights) or none. Tensors are gathered and written one at a time, so no process
holds the whole model.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors import safe_open
from torch import Tensor

from proxy.pool.errors import UserError
from proxy.pool.terminal.progress import MEGABYTE, Advance, unseen
from trainer.megatron.atomic_dir import replace_directory
from trainer.megatron.model.model import PolicyModel
from trainer.megatron.shards import write_tensors

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
"""Megatron's names of parameters outside of layers -> Hugging Face's."""
_LAYER = {
    "input_layernorm.weight": ["input_layernorm.weight"],
    "pre_mlp_layernorm.weight": ["post_attention_layernorm.weight"],
    "self_attention.q_layernorm.weight": ["self_attn.q_norm.weight"],
    "self_attention.k_layernorm.weight": ["self_attn.k_norm.weight"],
    "self_attention.linear_qkv.weight": [f"self_attn.{x}_proj.weight" for x in "qkv"],
    "self_attention.linear_qkv.bias": [f"self_attn.{x}_proj.bias" for x in "qkv"],
    "self_attention.linear_proj.weight": ["self_attn.o_proj.weight"],
    "mlp.linear_fc1.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.linear_fc2.weight": ["mlp.down_proj.weight"],
    "mlp.router.weight": ["mlp.gate.weight"],
    # Transformer Engine's layers contain the norm before them (trainer/megatron/model/transformer_engine.py).
    "self_attention.linear_qkv.layer_norm_weight": ["input_layernorm.weight"],
    "mlp.linear_fc1.layer_norm_weight": ["post_attention_layernorm.weight"],
}
"""Within a layer: Megatron's name -> the tensors of Hugging Face that it consists of, in order."""
_EXPERT = re.compile(r"(decoder\.layers\.\d+\.mlp\.)experts\.local_experts\.(\d+)\.(.+)")
"""An expert's parameter; group 2 is the number of the expert, groups 1 + 3 the name in a dense layer."""
_NOT_COPIED = re.compile(r".*\.(safetensors|safetensors\.index\.json|bin|pt|pth|gguf)$")
"""Weight files of the source directory, which an export must not copy beside its own."""


def _hf_names(name: str) -> list[str]:
    """The Hugging Face tensors that make up one parameter. `name`: in the whole model, not of one rank."""
    if name in _TOP:
        return [_TOP[name]]
    expert = _EXPERT.fullmatch(name)
    if expert is not None:
        dense = _hf_names(expert[1] + expert[3])
        return [hf_name.replace(".mlp.", f".mlp.experts.{expert[2]}.") for hf_name in dense]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    assert match is not None, name
    return [f"model.layers.{match[1]}.{suffix}" for suffix in _LAYER[match[2]]]


@torch.no_grad()
def load_weights(model: PolicyModel, directory: Path, loaded: Advance = unseen) -> None:
    """Fill this rank's part of the model from a Hugging Face directory. UserError for a missing tensor.

    `loaded` is called with the megabytes of each parameter.
    """
    tensors = SafetensorsReader(directory)
    for name, param in named_weights(model):
        load_parameter(name, param, tensors.read, model.config)
        loaded(param.nbytes / MEGABYTE)


def load_parameter(name: str, param: Tensor, read: Callable[[str], Tensor], config: TransformerConfig) -> None:
    """Fill this rank's part of one parameter. `read(name)` returns a whole Hugging Face tensor."""
    full = _join(name, [read(hf_name) for hf_name in _hf_names(name)], config)
    param.copy_(_shard(name, full, param))


def named_weights(model: PolicyModel) -> Iterator[tuple[str, Any]]:
    """Yield this rank's parameters by their names in the whole model, with layers and experts numbered over all ranks.

    An output layer that shares the embedding's weights has the embedding's name, also on the last of several stages,
    which holds a copy.
    """
    layers_before = model.decoder.layers[0].layer_number - 1
    for name, param in model.named_parameters():
        if model.share_embeddings_and_output_weights and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        name = re.sub(r"^decoder\.layers\.(\d+)", lambda match: f"decoder.layers.{layers_before + int(match[1])}", name)
        yield own_name(name, model.config), param


def export_weights(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, whole tensor on the CPU) of all stages. Collective: every rank iterates to the end."""
    for name, gathered in _whole_parameters(model):
        yield from _hf_tensors(name, gathered, model.config)


def export_parameter(name: str, param: Tensor, config: TransformerConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield the same for one parameter that every stage has; `name` is its name in the whole model."""
    yield from _hf_tensors(name, _gather(name, param), config)


def _hf_tensors(name: str, gathered: Tensor, config: TransformerConfig) -> Iterator[tuple[str, Tensor]]:
    """Cut a gathered parameter into Hugging Face's tensors; of experts, `gathered` holds one of each expert rank."""
    own_rank = parallel_state.get_expert_model_parallel_rank()
    experts = gathered.chunk(config.expert_model_parallel_size) if _EXPERT.fullmatch(name) else [gathered]
    for rank, parameter in enumerate(experts):
        expert_name = _renamed(name, rank - own_rank, config)
        for hf_name, tensor in zip(_hf_names(expert_name), _split(expert_name, parameter.cpu(), config), strict=True):
            yield hf_name, tensor.contiguous()


def own_name(name: str, config: TransformerConfig) -> str:
    """The name of this rank's parameter in the whole model, with experts numbered over all ranks."""
    return _renamed(name, parallel_state.get_expert_model_parallel_rank(), config)


def _renamed(name: str, ranks: int, config: TransformerConfig) -> str:
    """The name of an expert at the same place `ranks` expert ranks further on; other names stay as they are."""
    expert = _EXPERT.fullmatch(name)
    if expert is None:
        return name
    assert config.num_moe_experts is not None
    number = int(expert[2]) + ranks * (config.num_moe_experts // config.expert_model_parallel_size)
    return f"{expert[1]}experts.local_experts.{number}.{expert[3]}"


def _whole_parameters(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter of the model whole. The first stage that has one sends it to the ranks of the others."""
    group = parallel_state.get_pipeline_model_parallel_group()
    own = dict(named_weights(model))
    device = next(iter(own.values())).device
    described = [(name, _gathered_shape(name, param, model.config), param.dtype) for name, param in own.items()]
    stages: list[Any] = [None] * group.size()
    dist.all_gather_object(stages, described, group=group)
    sent = set()
    for stage, tensors in enumerate(stages):
        for name, shape, dtype in tensors:
            if name not in sent:
                sent.add(name)
                if stage == group.rank():
                    full = _gather(name, own[name])
                else:
                    full = torch.empty(shape, dtype=dtype, device=device)
                if group.size() > 1:
                    full = full.contiguous()  # a broadcast sends memory, whatever the strides are
                    dist.broadcast(full, dist.get_global_rank(group, stage), group=group)
                yield name, full


@dataclass(frozen=True)
class ExportExtras:
    """What an exported directory holds besides the model."""

    tensors: Iterable[tuple[str, Tensor]] = ()
    """(Hugging Face name, tensor). Every rank must iterate to the end."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Additional entries of config.json."""


def write_model(model: PolicyModel, source: Path, target: Path, extras: ExportExtras) -> None:
    """Write a complete Hugging Face directory: the weights of `model`, all other files as in `source`. Collective.

    Rank 0 writes; the other ranks only take part in gathering.
    """
    tensors = chain(export_weights(model), extras.tensors)
    if dist.get_rank() == 0:
        with replace_directory(target) as directory:
            for path in source.iterdir():
                if path.is_file() and path.name != "config.json" and not _NOT_COPIED.fullmatch(path.name):
                    shutil.copyfile(path, directory / path.name)
            write_tensors(directory, tensors)
            config = json.loads((source / "config.json").read_text()) | extras.config
            dtype = str(model.config.params_dtype).removeprefix("torch.")  # that of the extras may be another one
            config["dtype" if "dtype" in config else "torch_dtype"] = dtype
            (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    else:
        for _ in tensors:
            pass
    dist.barrier()


class SafetensorsReader:
    """The tensors of a directory, from one file or from several. UserError when it has no file."""

    def __init__(self, directory: Path):
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            raise UserError(f"{directory} has no *.safetensors file; name a model directory with weights")
        self.handles = [safe_open(os.fspath(path), framework="pt") for path in paths]
        self.file_of = {name: handle for handle in self.handles for name in handle.keys()}
        self.directory = directory

    def read(self, name: str) -> Tensor:
        """The whole tensor of this name, on the CPU. UserError when it is missing."""
        if name not in self.file_of:
            raise UserError(f"{self.directory} has no tensor {name}, which its config.json implies; complete it")
        return self.file_of[name].get_tensor(name)


def _join(name: str, parts: list[Tensor], config: TransformerConfig) -> Tensor:
    """Join Hugging Face's tensors into Megatron's parameter."""
    if len(parts) == 3:  # q, k, v: Megatron groups the rows by key-value head: its queries, its key, its value
        groups, size = config.num_query_groups, config.kv_channels
        rest = parts[0].shape[1:]
        return torch.cat([part.view(groups, -1, size, *rest) for part in parts], dim=1).reshape(-1, *rest)
    return torch.cat(parts)


def _split(name: str, full: Tensor, config: TransformerConfig) -> list[Tensor]:
    """Cut Megatron's parameter into Hugging Face's tensors: the inverse of `_join`."""
    count = len(_hf_names(name))
    if count < 3:
        return list(full.chunk(count))
    groups, size, rest = config.num_query_groups, config.kv_channels, full.shape[1:]
    per_group = config.num_attention_heads // groups
    blocks = full.view(groups, per_group + 2, size, *rest).split([per_group, 1, 1], dim=1)
    return [block.reshape(-1, *rest) for block in blocks]


def _is_split(name: str, param: Tensor) -> bool:
    """Whether tensor ranks hold parts of this parameter. Every expert is whole on its rank."""
    if _EXPERT.fullmatch(name):
        return False
    return vars(param).get("tensor_model_parallel", False) and parallel_state.get_tensor_model_parallel_world_size() > 1


def _shard(name: str, full: Tensor, param: Tensor) -> Tensor:
    """This tensor rank's part of a parameter."""
    if not _is_split(name, param):
        return full
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    if name.endswith("mlp.linear_fc1.weight"):  # each rank has its part of gate, then its part of up
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, vars(param)["partition_dim"])[rank]


def _gathered_shape(name: str, param: Tensor, config: TransformerConfig) -> list[int]:
    """The shape that `_gather` returns, for the stages that only receive."""
    shape = list(param.shape)
    if _EXPERT.fullmatch(name):
        shape[0] *= config.expert_model_parallel_size
    if _is_split(name, param):
        shape[vars(param)["partition_dim"]] *= parallel_state.get_tensor_model_parallel_world_size()
    return shape


def _gather(name: str, param: Tensor) -> Tensor:
    """The whole parameter, from all tensor ranks. Collective over them.

    For an expert: the experts at this place on all expert ranks, concatenated in the first dimension.
    """
    if _EXPERT.fullmatch(name):
        return torch.cat(_gather_parts(param, parallel_state.get_expert_model_parallel_group()))
    if not _is_split(name, param):
        return param.data
    parts = _gather_parts(param, parallel_state.get_tensor_model_parallel_group())
    if name.endswith("mlp.linear_fc1.weight"):
        return torch.cat([part.chunk(2)[0] for part in parts] + [part.chunk(2)[1] for part in parts])
    return torch.cat(parts, vars(param)["partition_dim"])


def _gather_parts(param: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(param) for _ in range(group.size())]
    dist.all_gather(parts, param.data.contiguous(), group=group)
    return parts
