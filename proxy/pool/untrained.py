"""Why a sampled token is not trained, or weighs nothing in the loss: the whole list.

Everything that leaves out a token, a completion, a rollout or a group names one of these reasons, with a detail where
one reason has several causes. The pool stores both (`completions.untrainable`, `groups.reason`), and each train step
counts its tokens by them (`excluded_tokens`, `masked_tokens`). docs/training.md shows the list as a table.
Left out: failures of rollouts (proxy/pool/rollouts/failures.py), and tokens that a loss weighs with 0 because of their
probability ratio (trainer/loss), which are trained tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class UntrainedReason(StrEnum):
    """One reason. Its value is stored, so it never changes without a migration."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    # of a completion, known when it is recorded
    ABANDONED = "abandoned", "the client left before it had the whole answer"
    ENGINE_FAILED = "engine_failed", "the engine failed before the answer was complete; detail: how"
    VERSION_MISSING = "version_missing", "the engine named no weight version for some tokens; detail: for which it did"
    CONSTRAINED = "constrained", 'a grammar enforced the form of the answer (`proxy.prescribed = "grammar"`)'
    SAMPLING_PARAMETERS = "sampling_parameters", "it was sampled with other parameters than training's; detail: which"
    REPLAYED = "replayed", "a recorded attempt's answer, with which this one begins; detail: the recorded completion"
    TEXT_ONLY = "text_only", "the answer came from a provider that returns text without token ids; detail: how it ended"
    IMPORTED = "imported", "a demonstration from elsewhere (docs/traces.md), for imitation only; detail: made of what"
    # of a completion, known when a batch is assembled
    LABEL = "label", "completions of this label are not trained (batch.labels); detail: the label"
    LOGPROBS_MISSING = "logprobs_missing", "the engine returned fewer logprobs than tokens"
    CHECKSUM = "checksum", "the stored tokens do not match the checksum that was taken when they were served"
    UNFINISHED = "unfinished", "imitation takes whole replies only; detail: the finish reason of this one"
    TOO_LONG = "too_long", "its path has more tokens than a micro-batch holds (batch.max_tokens)"
    OTHER_VERSION = "other_version", "the comparison of logprobs takes completions of one version only"
    # of a token
    GIVEN = "given", 'the proxy wrote the token, to begin a prescribed call (`proxy.prescribed = "prefill"`)'
    LOGPROB_NOT_FINITE = "logprob_not_finite", "its logprob is not finite, or nothing stands before the token"
    # of an attempt
    RETRIED = "retried", "another attempt has the outcome of the rollout, or will have it"
    # of a completion or of a rollout
    FUNCTION = "function", "batch.function left it out or failed on it; detail: the function, and how it failed"
    # of a rollout
    HELD_OUT = "held_out", "its group, or its run, is for evaluation"
    ROLLOUT_FAILED = "rollout_failed", "the rollout has no verdict because it failed; detail: the kind of failure"
    REPLAY_DIFFERED = "replay_differed", "it left the recorded attempt with which it begins before it should"
    NO_REWARD = "no_reward", "the rollout has no reward, without a failure"
    NO_VERSION = "no_version", "no known version of this run sampled the rollout, so its staleness is unknown"
    TRUNCATED = "truncated", "the last turn was cut at its limit, or for repeating itself (credit.mask)"
    BUDGET = "budget", "the agent used up its time or tokens (credit.mask)"
    TURNS = "turns", "the agent used up its turns (credit.mask)"
    MONITOR = "monitor", "a rule of the monitor masks the rollout; detail: the rule"
    HACKED = "hacked", 'it cheated (integrity = "mask"); detail: the detectors that say so'
    NEGATIVE_ADVANTAGE = "negative_advantage", "negative advantages weigh 0 in this step (loss.negative_*)"
    # of a rollout, or of a group
    ROLLED_BACK = "rolled_back", "weights that a rollback has retired sampled it, before a step took it"
    STALE = "stale", "the oldest token lags more than batch.max_staleness steps behind"
    # of a group
    GROUP_FILTERED = "group_filtered", "a member's failure drops the whole group; detail: the kind of failure"
    TOO_FEW_VALID = "too_few_valid", "no more than half of the group's rollouts have a verdict that counts"
    GRADIENT_NOT_FINITE = (
        "gradient_not_finite",
        "the gradient of the step that took the group was not finite; detail: which",
    )
    DISCARDED = (
        "discarded",
        "a rollback has discarded the step that trained the group, or its task was dropped; detail: the monitor's rule",
    )
    EQUAL_REWARDS = "equal_rewards", "all rewards of the group are equal, process rewards too, so they teach nothing"


LISTED_DETAILS = (
    UntrainedReason.LABEL,
    UntrainedReason.UNFINISHED,
    UntrainedReason.ROLLOUT_FAILED,
    UntrainedReason.MONITOR,
    UntrainedReason.GROUP_FILTERED,
    UntrainedReason.DISCARDED,
)
"""Reasons whose details come from a short list."""


@dataclass(frozen=True)
class Untrained:
    """A reason and what is particular about this case."""

    reason: UntrainedReason
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else str(self.reason)

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Read what `str` wrote."""
        reason, _, detail = text.partition(": ")
        return cls(UntrainedReason(reason), detail)  # type: ignore[call-arg]  # as below

    @property
    def heading(self) -> str:
        """The text under which sums over a run count it: without a detail that each case has its own of."""
        return heading(str(self))

    @classmethod
    def from_columns(cls, reason: str | None, detail: str | None) -> "Untrained | None":
        """Read the two columns. ValueError for a reason that is not in the list."""
        if reason is None:
            return None
        return cls(UntrainedReason(reason), detail or "")  # type: ignore[call-arg]  # mypy reads __new__, not the lookup


def heading(text: str) -> str:
    """Return the heading of a reason's text."""
    reason = text.partition(": ")[0]
    return text if reason in LISTED_DETAILS else reason


def to_metrics(counts: Mapping[Untrained, int]) -> dict[str, int]:
    """Counts of tokens as the metrics of a step hold them: text of the reason -> tokens."""
    return {str(why): count for why, count in counts.items()}
