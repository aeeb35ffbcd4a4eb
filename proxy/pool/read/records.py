"""The records that a reader of the pool gets: a rollout, and its completions with their whole token paths.

Shapes: T is the number of tokens of a completion's path, P of its prompt, S of the tokens that the model sampled.
Left out: requests, which a pool does not keep, and routed experts, of which a token has hundreds.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from proxy.pool.completions.observed import Observed
from proxy.pool.completions.records import GivenSpan, VersionSpan
from proxy.pool.untrained import Untrained


@dataclass(frozen=True, kw_only=True)
class CompletionRecord:
    """One model call. Its tokens are those that the engine saw and sampled, and match the checksum of that moment."""

    id: int
    ordinal: int
    """Its place among the calls of its attempt, from 0."""
    label: str | None
    """main | subagent | side | compaction; provisional while the attempt is open; None: older than labels."""
    follows: int | None
    """The completion whose reply the request continues."""
    prefix_of: int | None
    """The completion whose path the prompt begins with."""
    prefix_length: int
    """How many of that completion's tokens it begins with."""
    message: dict[str, Any]
    """The answer as the agent saw it: role, content, tool_calls, reasoning_content."""
    finish_reason: str
    tokens: "array[int]"
    """[T] int32: the prompt, then the answer."""
    prompt_length: int
    """P. The answer is tokens[P:]."""
    given: tuple[GivenSpan, ...]
    """Spans [start, end) of `tokens` that the proxy wrote to begin a prescribed call, or replayed. Never trained."""
    logprobs: "array[float]"
    """[S] float32: of the answer's tokens that are not given, in order. Fewer only where `untrainable` is set."""
    versions: tuple[VersionSpan, ...]
    """Weight versions by spans [start, end) of the answer: 0 is the token at P. Given tokens have none."""
    untrainable: Untrained | None
    """Why the call cannot be trained, known when it was recorded."""
    untrained: Untrained | None
    """Why it is not trained: that, or what is known of its label, attempt, rollout and group. None: no reason."""
    misfit: str | None
    """How it misses the form that its request prescribed; empty: it does not; None: it was free, or enforced."""
    started_at: float
    finished_at: float
    """Unix time."""
    observed: Observed | None
    """What its request showed; None: not known."""

    def sampled_places(self) -> list[int]:
        """[S]: the places in `tokens` of the tokens that the model sampled, in the order of `logprobs`."""
        given = {place for start, end in self.given for place in range(start, end)}
        return [place for place in range(self.prompt_length, len(self.tokens)) if place not in given]

    @property
    def mask(self) -> "array[int]":
        """[T] int8: 1 where the token was sampled and may be trained, so at most once over all records of a run."""
        return self._mask(self.sampled_places() if self.untrainable is None else ())

    @property
    def given_mask(self) -> "array[int]":
        """[T] int8: 1 where the proxy wrote the token of the answer."""
        return self._mask(place for start, end in self.given for place in range(start, end))

    @property
    def prompt_mask(self) -> "array[int]":
        """[T] int8: 1 where the token is one of the prompt."""
        return self._mask(range(self.prompt_length))

    def _mask(self, places: Any) -> "array[int]":
        mask = array("b", bytes(len(self.tokens)))
        for place in places:
            mask[place] = 1
        return mask


@dataclass(frozen=True, kw_only=True)
class RolloutRecord:
    """One attempt at a task: the one that gave its rollout the outcome, or another one."""

    run: str
    task: str
    domain: str
    group: int
    """Its place in the run's queue. Groups of one run have different ones."""
    group_state: str
    """RUNNING | DONE | LEASED | CONSUMED | TOMBSTONE (docs/architecture.md)."""
    step: int | None
    """The train step that took the group."""
    rollout: int
    """Id of the rollout."""
    member: int
    """Its number in the group, from 0."""
    attempt: int | None
    """Id of the attempt; None: the rollout was called off before it had one."""
    agent: str | None
    dated_at: float | None
    """The unix time that chat templates read for dates; None: there is no attempt."""
    closed_at: float | None
    """When the attempt ended, unix time; None: it is open, or there is none."""
    final: bool
    """This attempt gave the rollout its outcome. The others have neither reward nor failure here."""
    reward: float | None
    """None: there is none, which is not 0."""
    reward_parts: dict[str, float] | None
    failure: str | None
    """A kind of proxy/pool/rollouts/failures.py."""
    weight: float | None
    """Weight of its tokens in the loss, by the user's function (`batch.function`); None: none was asked about it."""
    hacked: str | None
    """tell | mask | zero: it cheated, and what becomes of it (docs/integrity.md); None: nobody says so."""
    completions: tuple[CompletionRecord, ...]
    """Its completions in the order of their commits."""

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one flat row for each completion. The columns are those of proxy/pool/read/arrow.py."""
        place = {name: getattr(self, name) for name in PLACE}
        outcome = {name: getattr(self, name) for name in OUTCOME}
        for item in self.completions:
            own = {name: getattr(item, name) for name in OWN}
            why = item.untrainable
            reasons = {
                "untrainable": None if why is None else why.reason,
                "untrainable_detail": None if why is None else why.detail,
                "untrained": None if item.untrained is None else str(item.untrained),
            }
            yield place | {"completion": item.id} | own | reasons | outcome


PLACE = (
    "run", "task", "domain", "group", "group_state", "step", "rollout", "member", "attempt", "agent", "final"
)  # fmt: skip
OWN = (
    "ordinal", "follows", "prefix_of", "prefix_length", "message", "label", "finish_reason", "misfit", "tokens",
    "prompt_length", "mask", "given", "logprobs", "versions",
)  # fmt: skip
OUTCOME = ("reward", "reward_parts", "failure", "weight", "hacked")
