"""The file that verl's `DataProto.load_from_disk` reads: a pickle.

It is written without verl and tensordict, whose versions differ between installations. So it holds neither's objects,
but calls of their public constructors, which are made where the file is loaded.
"""

import pickle
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from proxy.pool.export.sequences import Batch, TokenSequence, origin, torch_module


def write_verl(batch: Batch, step: int, file: Path) -> None:
    """Write a batch as the tensors that verl's agent loop returns.

    B sequences; P is the longest prompt, padded on its left; R the longest response, padded on its right.
    """
    tensors = _padded([part for _, part in batch])
    scores = torch_module().zeros(tensors["responses"].shape)
    for row, (rollout, part) in enumerate(batch):
        scores[row, len(part.tokens) - part.prompt_length - 1] = rollout.reward
    origins = [origin(rollout) for rollout, _ in batch]
    columns = {
        "uid": [f"{origin['run']}/{origin['group']}" for origin in origins],  # members of a group are compared
        "data_source": [origin["domain"] for origin in origins],
        "blackforge": origins,
    }
    texts = {name: _Call(_Name("numpy", "array"), values, "object") for name, values in columns.items()}
    turns = _Call(_Name("numpy", "array"), [part.turns for _, part in batch], "int32")
    data = _Call(_Name("tensordict", "TensorDict"), tensors | {"rm_scores": scores}, [len(batch)])
    proto = _Call(_Name("verl.protocol", "DataProto"), data, texts | {"__num_turns__": turns}, {"global_steps": step})
    file.write_bytes(pickle.dumps(proto))


def _padded(parts: list[TokenSequence]) -> dict[str, Any]:
    """Return prompts [B, P], responses [B, R], input_ids [B, P + R] and what belongs to them."""
    torch = torch_module()
    before = max(part.prompt_length for part in parts)
    after = max(len(part.tokens) - part.prompt_length for part in parts)
    ids = torch.zeros(len(parts), before + after, dtype=torch.int64)
    attention, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    logprobs = torch.zeros(ids.shape)
    for row, part in enumerate(parts):
        start = before - part.prompt_length
        span = slice(start, start + len(part.tokens))
        ids[row, span] = torch.tensor(part.tokens)
        attention[row, span] = 1
        mask[row, span] = torch.tensor(part.mask, dtype=torch.int64)
        logprobs[row, span] = torch.tensor(part.logprobs)
    return {
        "prompts": ids[:, :before].clone(),
        "responses": ids[:, before:].clone(),
        "response_mask": mask[:, before:].clone(),
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "rollout_log_probs": logprobs[:, before:].clone(),
    }


@dataclass(frozen=True)
class _Module:
    """A module of the reader's libraries, by name."""

    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return import_module, (self.name,)


@dataclass(frozen=True)
class _Name:
    """A function or class of such a module."""

    module: str
    name: str

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (_Module(self.module), self.name)

    def __call__(self) -> None:
        raise TypeError(f"{self.module}.{self.name} is called where the file is loaded")  # pickle demands a callable


class _Call:
    """What a function returns, called when the file is loaded."""

    def __init__(self, function: _Name, *arguments: Any):
        self._function, self._arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self._function, self._arguments
