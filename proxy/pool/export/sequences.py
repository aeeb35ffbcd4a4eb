"""The token sequences that a rollout gives to another trainer: one for each history that only grew.

A completion whose prompt begins with the whole path of an earlier one continues that one's sequence, since causal
attention makes training both at once exact. Any other completion (a fork, a rewritten history) begins a sequence. Each
trained token is in one sequence. trainer/data/assemble.py makes rows by the same rule.
"""

from array import array
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

from proxy.pool.errors import UserError
from proxy.pool.read.records import CompletionRecord, RolloutRecord


@dataclass(frozen=True, kw_only=True)
class TokenSequence:
    """T tokens, of which the first P are the prompt of the first call."""

    tokens: "array[int]"
    """[T]"""
    prompt_length: int
    """P"""
    mask: "array[int]"
    """[T] int8: 1 where the token is trained."""
    logprobs: "array[float]"
    """[T] float32: under the weights that sampled the token; 0 where `mask` is 0, which says nothing."""
    versions: tuple[str, ...]
    """Weight versions, of each call in turn."""
    turns: int
    finish_reason: str
    """Finish reason of the last call."""


def sequences(rollout: RolloutRecord) -> list[TokenSequence]:
    """Return the sequences of a rollout that have a trained token."""
    lengths = {item.id: len(item.tokens) for item in rollout.completions}
    by_last: dict[int, TokenSequence] = {}
    for item in rollout.completions:
        before = None
        if item.prefix_of is not None and item.prefix_length == lengths[item.prefix_of]:
            before = by_last.pop(item.prefix_of, None)  # gone: another completion has continued it
        by_last[item.id] = _continued(before, item)
    return [sequence for sequence in by_last.values() if any(sequence.mask)]


def _continued(before: TokenSequence | None, item: CompletionRecord) -> TokenSequence:
    mask = array("b", bytes(len(item.tokens)))
    logprobs = array("f", bytes(4 * len(item.tokens)))
    if before is not None:
        mask[: len(before.mask)] = before.mask
        logprobs[: len(before.logprobs)] = before.logprobs
    places = item.sampled_places()
    if item.untrained is None and len(places) == len(item.logprobs):
        for place, logprob in zip(places, item.logprobs, strict=True):
            mask[place], logprobs[place] = 1, logprob
    return TokenSequence(
        tokens=item.tokens,
        prompt_length=item.prompt_length if before is None else before.prompt_length,
        mask=mask,
        logprobs=logprobs,
        versions=(*(() if before is None else before.versions), *(span.version for span in item.versions)),
        turns=1 if before is None else before.turns + 1,
        finish_reason=item.finish_reason,
    )


Batch = list[tuple[RolloutRecord, TokenSequence]]
"""Sequences with the rollouts that they are part of."""


def origin(rollout: RolloutRecord) -> dict[str, Any]:
    """Return where a rollout comes from, for the batches' own metadata."""
    names = ("run", "task", "domain", "group", "member", "rollout", "attempt", "reward_parts", "weight")
    return {name: getattr(rollout, name) for name in names}


def torch_module() -> ModuleType:
    """Return torch, which writes the batches; UserError when it is not installed."""
    try:
        return import_module("torch")  # takes seconds, and is needed for these formats only
    except ModuleNotFoundError as error:
        raise UserError("these files need torch; install blackforge[trainer] or use another --format") from error
