"""The record that crosses from proxy to trainer: one completion, holding only what it adds to the attempt's tree."""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.pool.completions.routed_experts import RoutedExperts
from proxy.pool.untrained import Untrained

SERVED_FINISH_REASONS = ("stop", "length", "tool_calls")
"""Finish reasons of whole answers: clients continue them, and a retry may get one again. Others: abort, error."""


@dataclass(frozen=True)
class VersionSpan:
    """Sampled tokens [start, end) came from weight version `version`."""

    version: str
    start: int
    end: int


class HistoryDigest(msgspec.Struct, frozen=True, array_like=True):
    """Names the messages before a turn, each by 64 bits of a digest (proxy/prompt/history.py)."""

    whole: int
    outline: int
    """Of the same without tool results, which agents shorten later on."""


class RequestShape(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What of a request tells its label (proxy/pool/completions/labels.py) and its place. The numbers name a text, they
    do not hold it."""

    tools: int = 0
    """Names the set of offered tools; 0: none."""
    system: int = 0
    """Names the system prompt; 0: none."""
    opening: int = 0
    """Names the first message after the system prompt."""
    turns: int = 0
    """Assistant turns in the request."""
    continues: int | None = None
    """The completion that its last recorded assistant turn repeats, whatever else the agent changed."""
    quotes: int | None = None
    """The newest completion whose own words stand in it outside of assistant turns. Looked for where the history is new
    or rewritten only."""
    constrained: bool = False
    """The answer's form was prescribed: a grammar, or a tool that must be called."""
    history: HistoryDigest | None = None
    """What stood before the turn, by which later requests know that they continue it; None without messages."""


@dataclass(frozen=True, kw_only=True)
class NewCompletion:
    """A completion on its way into the pool. Token arrays are array('i'), logprobs array('f').

    Its whole path is path(prefix_of)[:prefix_length] + prompt_tail + sampled; a path is prompt and sampled tokens.
    """

    attempt_id: int
    prefix_of: int | None = None
    prefix_length: int = 0
    follows: int | None = None
    """The completion whose reply this request continues. Conversation; `prefix_of` is storage and may differ."""
    prompt_tail: "array[int]"
    sampled: "array[int]"
    logprobs: "array[float]"
    """One per sampled token, natural log, at the sampling distribution; fewer only when untrainable."""
    versions: tuple[VersionSpan, ...]
    finish_reason: str
    """stop | tool_calls | length | abort | error."""
    untrainable: Untrained | None = None
    """None: every sampled token has its id, logprob and version. Otherwise the reason why it is not trained."""
    reply: dict[str, Any]
    """The assistant message as the agent saw it: role, content, tool_calls, reasoning_content."""
    shape: RequestShape | None = None
    """What its label is made from; None in rows of before labels."""
    path_crc: int
    """zlib.crc32 of the whole path as little-endian int32, computed from what the engine saw."""
    started_at: float
    finished_at: float
    fingerprint: bytes = b""
    """Of the request: repeats of it have the same. Empty where no repeat is served from this completion."""
    experts: RoutedExperts | None = None
    """What a mixture of experts chose for the tokens that are new here; None where nobody asked, or none came."""

    @property
    def prompt_length(self) -> int:
        return self.prefix_length + len(self.prompt_tail)


@dataclass(frozen=True, kw_only=True)
class Completion(NewCompletion):
    """A completion as stored. `ordinal` counts the attempt's completions in the order of their commits."""

    id: int
    ordinal: int
    label: str | None = None
    """main | subagent | side | compaction; None while the attempt is open, and in rows of before labels."""


def int_bytes(tokens: Iterable[int]) -> bytes:
    """Tokens as little-endian int32."""
    return _little_endian(array("i", tokens))


def float_bytes(values: Iterable[float]) -> bytes:
    """Logprobs as little-endian float32."""
    return _little_endian(array("f", values))


def ints(data: bytes) -> "array[int]":
    return _from_little_endian(array("i"), data)


def floats(data: bytes) -> "array[float]":
    return _from_little_endian(array("f"), data)


def _little_endian(values: "array[Any]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_little_endian(values: "array[Any]", data: bytes) -> "array[Any]":
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
