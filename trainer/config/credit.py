"""The section [credit] of the trainer's configuration: what a rollout's reward is made of, and which turn gets it.

Left out: the arithmetic (trainer/credit/returns.py, trainer/credit/assign.py).
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from proxy.pool.behaviour.process import ProcessRule
from proxy.pool.settings_file import Count, NotNegative, Weight, demand
from proxy.pool.untrained import UntrainedReason

Mask = Literal["truncated", "budget", "turns"]
"""Reasons of proxy/pool/untrained.py for which a rollout keeps the baseline and is not trained."""


class ProcessRewards(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [credit.process]: what a turn costs for its events (docs/behaviour.md) and its length. 0: nothing.

    Keep each cost, times `process_weight`, so small that several of them stay within PROCESS_BOUND (0.2): above it a
    further event costs nothing more, and those before it cost less.
    """

    tool_errors: Weight = 0.0
    """Cost of each tool call that fails, does not fit its schema, or names an unknown tool."""
    language_mixing: Weight = 0.0
    """Cost of each strange script in a turn's reasoning or reply."""
    retry_loops: Weight = 0.0
    """Cost of each call that fails for at least the third time in a row."""
    full_context: Weight = 0.0
    """Cost of each turn of the main work whose prompt is longer than `full_context_tokens`, unless it calls `compact`,
    `discard` or `fold` (FoldAgent) and the call is not refused."""
    full_context_tokens: NotNegative = 0
    """Such as half of the context. Required with `full_context`."""

    def __post_init__(self) -> None:
        demand(
            bool(self.full_context) == bool(self.full_context_tokens),
            f"credit.process.full_context = {self.full_context} and full_context_tokens = {self.full_context_tokens} "
            "belong together; set both, or neither",
        )


class Credit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [credit]."""

    PROCESS_BOUND = 0.2
    """Maximum sum of a rollout's process rewards; larger sums are scaled down. Otherwise useless steps would pay. Twice
    this and the speed bonus must stay below SUCCESS, so that no failure outdoes a success."""
    SUCCESS = 1.0
    """Reward from which a rollout counts as successful: verifiers give 1 for a solved task."""
    TOKENS_PER_SECOND = 50.0
    """Speed at which model calls count towards the duration T: their real time depends on the batch they were in. Only
    ratios of T within a group matter, so the exact value hardly does."""

    returns: Literal["outcome", "turns"] = "outcome"
    """outcome: every turn gets its rollout's `loss.advantage`. turns: reward-to-go per turn against `baseline`, which
    differs only where turns have process rewards or `gamma` is below 1."""
    gamma: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    """Discount per turn still to come. With loss.kind = ipa: discount of its chunk returns."""
    baseline: Literal["first", "aligned", "none"] = "first"
    """What returns per turn are compared with. first: the other rollouts' returns of their first turn (MiniMax-M2).
    aligned: their returns of the same turn (less variance where tasks take equally many turns). none: nothing (IPA with
    signed rewards)."""
    scale: Literal["none", "domain"] = "none"
    """domain: divide returns per turn by the running standard deviation of first-turn returns over the rollouts of the
    same domain in earlier steps."""
    process_weight: Weight = 1.0
    """Factor on each turn's process reward: its reward part `turn:N` minus what its events cost by [credit.process],
    clipped to [-1, 1]. Used with returns = turns only."""
    process: ProcessRewards = ProcessRewards()
    """What the events of a turn cost."""
    speed_weight: Weight = 0.0
    """Factor on log2(T_base / T), clipped to [-1, 1], for successful rollouts. T: duration of the critical path;
    T_base: median of the group's other successes. T leaves out side calls, and with them the time of tools that run
    meanwhile: a policy whose shell reaches the proxy can hide slow tools behind calls of its own (docs/credit.md). In
    tasks with steps speed does not count."""
    overlong_limit: Count | None = None
    """Sampled tokens from which a successful rollout's reward is reduced by 1 (DAPO). Default: never."""
    overlong_margin: NotNegative = 0
    """Tokens below the limit over which this reduction grows from 0 to 1."""
    mask: tuple[Mask, ...] = ()
    """Rollouts to leave out of the loss; they stay in the baseline. truncated: the last turn was cut, at a token limit
    or for repeating itself. budget: the agent used up its time or tokens (agent_budget), a limit that the policy cannot
    see unless its prompt says it. turns: the agent used up its turns (agent_turns), as ROLL masks those at the maximum.
    """
    shuffle_rewards: bool = False
    """Shuffle the rewards within each group before training: a control run that must not learn."""

    def __post_init__(self) -> None:
        demand(
            self.overlong_limit is None or self.overlong_limit > self.overlong_margin,
            f"credit.overlong_limit = {self.overlong_limit} is not above credit.overlong_margin = "
            f"{self.overlong_margin}; raise it",
        )
        demand(
            self.overlong_limit is not None or not self.overlong_margin,
            f"credit.overlong_margin = {self.overlong_margin} is a margin below credit.overlong_limit, which is not "
            "set; set it, or remove the margin",
        )
        for name, value, default in (
            ("baseline", self.baseline, "first"),
            ("scale", self.scale, "none"),
            ("process_weight", self.process_weight, 1.0),
        ):
            demand(
                self.by_turn or value == default,
                f"credit.{name} = {value} is for returns per turn, and credit.returns = outcome; set that to turns",
            )
        demand(
            not any(msgspec.structs.asdict(self.process).values()) or (self.by_turn and self.process_weight > 0),
            "credit.process makes rewards of single turns, which credit.returns = outcome or process_weight = 0 does "
            "not use; set credit.returns = turns and a weight above 0, or drop [credit.process]",
        )
        process = 2 * self.PROCESS_BOUND if self.by_turn and self.process_weight else 0.0
        demand(
            not (process or self.speed_weight) or process + self.speed_weight < self.SUCCESS,
            f"credit.speed_weight = {self.speed_weight} and process rewards of up to {process / 2:g} either way reach "
            f"{self.SUCCESS:g}, so that a failure could outdo a success; lower it",
        )
        demand(
            not (self.shuffle_rewards and self.shaped),
            "credit.shuffle_rewards shuffles the verifier's rewards, and the rest of [credit] would still teach; drop "
            "one (process_weight = 0, speed_weight = 0, no overlong_limit)",
        )

    def process_rule(self, labels: Sequence[str]) -> ProcessRule | None:
        """Return how the process rewards of turns with these labels are made; None: they do not count."""
        if not self.by_turn or not self.process_weight:
            return None
        costs = msgspec.structs.asdict(self.process)
        return ProcessRule(
            labels=labels,
            factor=self.process_weight,
            bound=self.PROCESS_BOUND,
            full_context=costs.pop("full_context"),
            full_context_tokens=costs.pop("full_context_tokens"),
            penalties=costs,
        )

    @property
    def masked_failures(self) -> dict[str, UntrainedReason]:
        """The failures whose rollouts are left out of the loss, with the reason under which they are counted."""
        reasons = {"agent_budget": UntrainedReason.BUDGET, "agent_turns": UntrainedReason.TURNS}
        return {failure: reason for failure, reason in reasons.items() if reason in self.mask}

    @property
    def absolute(self) -> bool:
        """Whether returns are compared with nothing, so that a group of equal rewards other than 0 teaches too."""
        return self.by_turn and self.baseline == "none"

    @property
    def by_turn(self) -> bool:
        return self.returns == "turns"

    @property
    def by_domain(self) -> bool:
        return self.by_turn and self.scale == "domain"

    @property
    def shaped(self) -> bool:
        """Whether anything but the verifier's reward counts."""
        return bool(self.speed_weight or self.overlong_limit or (self.by_turn and self.process_weight))
