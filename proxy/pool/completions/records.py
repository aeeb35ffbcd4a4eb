"""The record that the proxy writes and the trainer reads: one completion, with only what it adds to its attempt."""

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.pool.completions.observed import Observed
from proxy.pool.completions.routed_experts import RoutedExperts
from proxy.pool.untrained import Untrained, UntrainedReason

REPETITION = "repetition"
"""Finish reason of an answer that the proxy ended because it repeated itself (proxy/engine/repetition.py)."""
CUT_FINISH_REASONS = ("length", REPETITION)
"""Finish reasons of answers that the model did not end itself. Clients see `length` for both."""
SERVED_FINISH_REASONS = ("stop", "tool_calls", *CUT_FINISH_REASONS)
"""Finish reasons of complete answers: clients continue them, and a retry may get one again. Others: abort, error."""


@dataclass(frozen=True)
class VersionSpan:
    """Sampled tokens [start, end) came from weight version `version`."""

    version: str
    start: int
    end: int


GivenSpan = tuple[int, int]
"""The tokens [start, end) of an answer, which the proxy wrote."""


class HistoryDigest(msgspec.Struct, frozen=True, array_like=True):
    """Digests of 64 bits of the messages before a turn (proxy/prompt/continuation/history.py)."""

    whole: int
    outline: int
    """Digest without tool results, which agents shorten later."""


class RequestShape(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """The structure of a request, which decides its label (proxy/pool/completions/labels.py) and its place.

    Texts are identified by a number (a digest), not stored.
    """

    tools: int = 0
    """Digest of the set of offered tools; 0: none."""
    system: int = 0
    """Digest of the system prompt; 0: none."""
    opening: int = 0
    """Digest of the first message after the system prompt."""
    turns: int = 0
    """Number of assistant messages in the request."""
    continues: int | None = None
    """The completion that the last assistant message repeats, whatever else the agent changed."""
    quotes: int | None = None
    """The newest completion that is quoted outside of assistant messages. Only looked for when the history is new or
    was rewritten."""
    constrained: bool = False
    """The request prescribed the form of the answer."""
    history: HistoryDigest | None = None
    """Digests of the messages before the turn, by which later requests recognise it; None without messages."""


@dataclass(frozen=True, kw_only=True)
class NewResponse:
    """What is stored of a Responses call, so that later calls of the attempt can name it and its items.

    Its context is context(prefix_of)[:prefix_length] + items, then the items of its output.
    """

    id: str
    previous: str | None
    """The response that the client named as the previous one."""
    prefix_of: str | None
    """An earlier response with whose context the input begins."""
    prefix_length: int
    items: tuple[bytes, ...]
    """The input's further items as JSON."""
    fields: dict[str, Any] | None
    """What the response repeats of the request; None where the row of `fields_of` has the same."""
    fields_of: str | None
    usage: dict[str, Any]
    created_at: int


@dataclass(frozen=True, kw_only=True)
class NewCompletion:
    """A completion that is about to be stored. Token arrays are array('i'), logprobs array('f').

    Its path (prompt and sampled tokens) is path(prefix_of)[:prefix_length] + prompt_tail + sampled.
    """

    attempt_id: int
    prefix_of: int | None = None
    prefix_length: int = 0
    follows: int | None = None
    """The completion whose reply this request continues. It is about conversation; `prefix_of` is about storage."""
    prompt_tail: "array[int]"
    sampled: "array[int]"
    """The answer's tokens: what the model sampled, and in `given` what the proxy wrote."""
    given: tuple[GivenSpan, ...] = ()
    """Which of `sampled` the proxy wrote: to begin a prescribed call (proxy/prompt/prefill.py), or because a recorded
    attempt is replayed (proxy/replay). Never trained."""
    logprobs: "array[float]"
    """Natural logarithms under the sampling distribution, one for each token of `sampled` that is not given, in order;
    fewer only when untrainable."""
    versions: tuple[VersionSpan, ...]
    """Given tokens have none."""
    finish_reason: str
    """stop | tool_calls | length | repetition | abort | error."""
    untrainable: Untrained | None = None
    """Why it cannot be trained; None: every token that the model sampled has its id, logprob and version."""
    reply: dict[str, Any]
    """The assistant message as the agent saw it: role, content, tool_calls, reasoning_content."""
    shape: RequestShape | None = None
    """The structure of its request; None in rows written before labels existed."""
    path_crc: int
    """zlib.crc32 of the whole path as little-endian int32, computed from what the engine saw."""
    started_at: float
    finished_at: float
    queued_seconds: float | None = None
    """Seconds between the two in which it waited for a place at the proxy and for an engine that is up. None: not
    known, as in rows written before it was recorded, or nothing was sampled."""
    fingerprint: bytes = b""
    """Fingerprint of the request, the same for its repeats. Empty where no repeat is served from this completion."""
    experts: RoutedExperts | None = None
    """The experts that a mixture chose for the new tokens; None: not requested, or not returned."""
    misfit: str | None = None
    """How the answer misses the form that its request prescribes and no grammar enforced; empty: it has this form.
    None: it was free, or enforced, or is not whole."""
    observed: Observed | None = None
    """What its request showed; None: nothing was kept, in text completions and in rows written before it was."""
    response: NewResponse | None = None
    """Set where later calls may name the answer: written in the same commit, and not read back with the completion."""

    @property
    def prompt_length(self) -> int:
        return self.prefix_length + len(self.prompt_tail)

    @property
    def given_count(self) -> int:
        """The number of tokens of the answer that the proxy wrote."""
        return sum(end - start for start, end in self.given)

    @property
    def replayed(self) -> bool:
        """Whether the answer was recorded in another attempt. Then all of its tokens are given."""
        return self.untrainable is not None and self.untrainable.reason == UntrainedReason.REPLAYED

    @property
    def prescribed(self) -> tuple[GivenSpan, ...]:
        """The given tokens that begin prescribed calls. Those of a replayed answer are not known."""
        return () if self.replayed else self.given

    @property
    def sampled_count(self) -> int:
        """The number of tokens of the answer that the model sampled."""
        return len(self.sampled) - self.given_count

    def sampled_places(self) -> list[int]:
        """The places in `sampled` of the tokens that the model sampled, in the order of `logprobs`."""
        given = {place for start, end in self.given for place in range(start, end)}
        return [place for place in range(len(self.sampled)) if place not in given]


@dataclass(frozen=True, kw_only=True)
class Completion(NewCompletion):
    """A stored completion. `ordinal` counts the attempt's completions in the order of their commits, from 0."""

    id: int
    ordinal: int
    label: str | None = None
    """main | subagent | side | compaction; None while the attempt is open, and in rows written before labels."""


def int_bytes(tokens: Iterable[int]) -> bytes:
    """Encode tokens as little-endian int32."""
    return _little_endian(array("i", tokens))


def float_bytes(values: Iterable[float]) -> bytes:
    """Encode logprobs as little-endian float32."""
    return _little_endian(array("f", values))


def ints(data: bytes) -> "array[int]":
    """Decode little-endian int32."""
    return _from_little_endian(array("i"), data)


def floats(data: bytes) -> "array[float]":
    """Decode little-endian float32."""
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
