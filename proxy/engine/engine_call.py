"""What one engine call is asked and what it answers: a `SamplingRequest`, and the `Sampling` that fills up.

What has come stays readable when the engine dies or the client goes away. Left out: the connection (client.py).
"""

import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import msgspec

from proxy.call import Grammar
from proxy.engine.moe_config import Mixture
from proxy.pool.completions.records import GivenSpan, VersionSpan
from proxy.pool.completions.routed_experts import RoutedExperts, joined, narrowed

REFUSALS = (400, 413, 422)
"""HTTP statuses by which an engine says that the request is at fault."""


class EngineError(Exception):
    """A call that the engine did not serve.

    `kind` is unreachable | died | silent | busy | refused | failed | no_logprobs | no_experts.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


def error_kind(status: int) -> str:
    """The kind of EngineError of an HTTP status: the request is at fault, the engine is overloaded, or it is broken."""
    return "refused" if status in REFUSALS else "busy" if status in (429, 503) else "failed"


Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class VersionRange(msgspec.Struct):
    """Sampled tokens [start, end) came from this weight version."""

    version: str
    start: int
    end: int


class FinishReason(msgspec.Struct):
    """Why the engine ended a call."""

    type: str
    """stop | length | abort."""
    message: str | None = None
    status_code: int | None = None


class EventMeta(msgspec.Struct):
    """SGLang's `meta_info`, as far as it is recorded."""

    finish_reason: FinishReason | None = None
    completion_tokens: int = 0
    weight_version: str | None = None
    weight_versions: list[VersionRange] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    output_top_logprobs: list[list[tuple[float | None, int, str | None]] | None] = []
    cached_tokens: int = 0
    spec_verify_ct: int = 0
    routed_experts: bytes | None = None


class GenerateEvent(msgspec.Struct):
    """One event of `/generate`, or its whole answer when it is not streamed."""

    output_ids: list[Id] = []
    meta_info: EventMeta = msgspec.field(default_factory=EventMeta)
    error: Any = None


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """One model call for the engine: the prompt's tokens, how to sample and where to stop."""

    prompt: bytes
    """The prompt's token ids as a JSON list."""
    prompt_length: int
    """The number of the prompt's tokens."""
    max_new_tokens: int
    distribution: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters (temperature, top_p, ...); the engine's defaults hold for what is left out."""
    end_ids: Sequence[int] = ()
    """Tokens that end the answer, besides the model's own end token."""
    stop: Sequence[str] = ()
    """Texts that end the answer. The engine returns their tokens, too, so that the row has all that was sampled."""
    grammar: Grammar | None = None
    """The form that the engine enforces; None where the answer is free."""
    top_logprobs: int = 0
    """How many of the likeliest tokens the engine names for each place."""
    stream: bool = False
    stop_repetition: bool = False
    """Whether the answer is ended when it does nothing but repeat itself (proxy/engine/repetition.py)."""
    rank: int | None = None
    """The data-parallel rank that samples; the engine chooses when None."""
    salt: str = ""
    """The engine uses only those cached prefixes that were stored with the same salt."""

    def behind(self, answer: Sequence[int], end_ids: Sequence[int], stop: Sequence[str]) -> "SamplingRequest":
        """The request for the rest of an answer whose first tokens these are. It ends at these tokens and texts too."""
        if not (answer or end_ids or stop):
            return self
        prompt = self.prompt
        if answer:
            prompt = prompt.rstrip()[:-1] + b"," + msgspec.json.encode(list(answer))[1:]
        return replace(
            self,
            prompt=prompt,
            prompt_length=self.prompt_length + len(answer),
            max_new_tokens=self.max_new_tokens - len(answer),
            end_ids=(*self.end_ids, *end_ids),
            stop=(*self.stop, *stop),
        )


@dataclass
class CallExperts:
    """The experts of one call of a mixture of experts: from where the engine names them, and what it named."""

    mixture: Mixture
    start: int
    """The first position of the prompt whose experts are not recorded yet."""
    received: bytes | None = None
    """What the engine sends with its last event: int32 [positions, layers, top_k]."""
    recorded: RoutedExperts | None = None
    """The same for the row, with those of the answer's earlier engine calls; None until `read`."""
    earlier: RoutedExperts | None = None
    """What the answer's earlier engine calls named."""

    def go_on(self) -> None:
        """Begin a further engine call of the same answer: it names the experts behind those of the last one."""
        if self.recorded is not None:
            self.start, self.earlier, self.recorded = self.recorded.end, self.recorded, None

    def read(self, path_length: int) -> None:
        """Check and pack what came: the positions from `start` to the last sampled token, which has none yet.

        `path_length`: tokens of the prompt and the answer. Raises EngineError "no_experts".
        """
        expected = path_length - 1 - self.start
        try:
            shape = self.mixture.layers, self.mixture.top_k
            experts = None if self.received is None else narrowed(self.received, self.start, *shape)
        except ValueError as error:
            raise EngineError("no_experts", f"the experts that the engine named cannot be read: {error}") from error
        if experts is None or experts.end - self.start != expected:
            raise EngineError(
                "no_experts",
                f"the engine named the experts of {experts.end - self.start if experts else 0} positions, not of "
                f"{expected}; start it with --enable-return-routed-experts, or set engine.routed_experts = false",
            )
        self.received, self.recorded = None, experts if self.earlier is None else joined(self.earlier, experts)


@dataclass
class Sampling:
    """What has been sampled so far."""

    ids: "array[int]" = field(default_factory=lambda: array("i"))
    """The answer's tokens: sampled ones, and given ones in the spans `given`."""
    given: tuple[GivenSpan, ...] = ()
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    top: list[list[tuple[float, int]]] = field(default_factory=list)
    """The likeliest tokens at each token's place, as (logprob, id); empty where the client wants none."""
    versions: tuple[VersionSpan, ...] = ()
    finish: str = ""
    """stop | length | repetition | abort; empty until the engine has said why it stopped."""
    cached_tokens: int = 0
    """Tokens of the last engine call's prompt that the engine did not compute again."""
    verifications: int = 0
    """How often the engine checked drafted tokens in its last call; 0 until that ends, and for one that drafts none."""
    version: str = ""
    """The weights that sampled the last tokens so far."""
    experts: CallExperts | None = None
    """None unless the experts of a mixture are recorded."""
    enough: int | None = None
    """Set by the caller once it has all that it wants: this many tokens. The engine is stopped then."""
    enough_finish: str = "stop"
    """What `finish` becomes then: stop | repetition."""
    start: int = 0
    """Where in `ids` the tokens of the last engine call begin."""
    queued_seconds: float | None = None
    """How long the call has waited for a place at the proxy and for an engine that is up; None: it has not asked
    for one."""
    _only_version: str = ""
    """The weights that the engine has named with all of these tokens so far; empty: several, or none."""

    @property
    def fresh(self) -> int:
        """Number of tokens that the last engine call has sampled so far."""
        return len(self.ids) - self.start

    @property
    def sampled(self) -> int:
        """Number of tokens that the engine has sampled so far, without given ones."""
        return len(self.ids) - self.given_count

    @property
    def given_count(self) -> int:
        return sum(end - start for start, end in self.given)

    def logprob_place(self, place: int) -> int | None:
        """Where in `logprobs` and `top` the token at a place of `ids` stands; None for a given token."""
        if any(start <= place < end for start, end in self.given):
            return None
        return place - sum(end - start for start, end in self.given if end <= place)

    def queued(self, since: float) -> None:
        """Count the time since this moment of the monotonic clock as waiting."""
        self.queued_seconds = (self.queued_seconds or 0.0) + time.monotonic() - since

    def go_on(self, given: Sequence[int] = ()) -> None:
        """Begin a further engine call of the same answer, behind the tokens `given`, which the model did not sample."""
        if given:
            self.given += ((len(self.ids), len(self.ids) + len(given)),)
            self.ids.extend(given)
        self.start, self.finish, self.verifications = len(self.ids), "", 0
        if self.experts is not None:
            self.experts.go_on()

    def break_off(self) -> list[int]:
        """End an engine call whose engine was lost, so that another one may go on; return the tokens that it sampled.

        A lost engine has not said which tokens are of which weights. They are of one version when it named no other
        one from the first of them to the last. The first and the last alone may agree, as a rollback brings a version
        back.
        """
        ids = self.ids[self.start :].tolist()
        if ids and self._only_version:
            self.versions += (VersionSpan(self._only_version, self.start, len(self.ids)),)
        self.go_on()
        return ids

    def extend(self, event: GenerateEvent) -> list[int]:
        """Take an event and return its new ids; an event may repeat ids that came before."""
        meta = event.meta_info
        fresh = meta.completion_tokens - self.fresh if meta.completion_tokens else len(event.output_ids)
        if fresh > len(event.output_ids):
            sent = len(event.output_ids)
            raise EngineError(
                "failed", f"the engine skipped tokens ({fresh} new, {sent} sent); use SGLang 0.5.23 or later"
            )
        new = event.output_ids[len(event.output_ids) - fresh :]
        self.ids.extend(new)
        entries = meta.output_token_logprobs[-fresh:] if fresh else []
        if [entry[1] for entry in entries] == new:
            self.logprobs.extend([entry[0] for entry in entries if entry[0] is not None])
        if fresh and meta.output_top_logprobs:
            places = meta.output_top_logprobs[-fresh:]
            self.top += [[(e[0], e[1]) for e in place or () if e[0] is not None] for place in places]
        self.cached_tokens, self.version = meta.cached_tokens, meta.weight_version or self.version
        self.verifications = meta.spec_verify_ct
        if fresh and len(self.ids) - fresh == self.start:
            self._only_version = self.version
        elif self.version != self._only_version:
            self._only_version = ""
        if self.experts is not None and meta.routed_experts is not None:
            self.experts.received = meta.routed_experts
        if meta.finish_reason is not None:
            self._end(meta, meta.finish_reason)
        return new

    def _end(self, meta: EventMeta, finish: FinishReason) -> None:
        spans = meta.weight_versions or []
        self.versions += tuple(
            VersionSpan(span.version, self.start + span.start, self.start + span.end) for span in spans
        )
        stopped = self.enough is not None and finish.type == "abort"
        self.finish = self.enough_finish if stopped else finish.type
        if finish.type == "abort" and finish.status_code:
            raise EngineError(error_kind(finish.status_code), f"the engine ended the call: {finish.message}")

    def cut(self, prompt_length: int) -> None:
        """Drop the tokens beyond those that are enough. The prompt before them has `prompt_length`."""
        if self.enough is None:
            return
        size = self.enough
        sampled = size - self.given_count
        del self.ids[size:], self.logprobs[sampled:], self.top[sampled:]
        spans = [VersionSpan(span.version, span.start, min(span.end, size)) for span in self.versions]
        self.versions = tuple(span for span in spans if span.start < span.end)
        self.finish = self.enough_finish
        if self.experts is not None and self.experts.recorded is not None:
            self.experts.recorded = self.experts.recorded.until(prompt_length + size - 1)

    def check(self) -> None:
        """Raise EngineError unless the engine ended the answer by itself and every token has its logprob."""
        wanted = self.sampled if self.enough is None else self.enough - self.given_count
        if min(len(self.logprobs), wanted) != wanted:
            raise EngineError(
                "no_logprobs",
                f"the engine returned {len(self.logprobs)} logprobs for {self.sampled} tokens; "
                "use SGLang 0.5.23 or later, or the scripted engine",
            )
        if self.finish == "abort":
            raise EngineError("failed", "the engine aborted the call (paused or restarted?); send it again")
