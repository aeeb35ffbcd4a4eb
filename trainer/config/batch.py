"""The section [batch] of the trainer's configuration: what a step takes from the pool, and how far sampling runs ahead.

B = `groups`, N = `queue_limit`, W = `window`; docs/schedule.md explains them. Left out: the queue itself
(proxy/pool/training/windowed_fifo.py).
"""

from typing import Annotated, Literal

import msgspec

from proxy.pool.settings_file import Count, NotNegative, Seconds, demand
from proxy.pool.training.windowed_fifo import LeaseRule

Schedule = Literal["synchronous", "overlap", "windowed", "strict", "greedy"]
BATCHES_OPEN: dict[Schedule, int] = {"synchronous": 1, "overlap": 2, "windowed": 4, "strict": 4, "greedy": 4}
"""N / B where `queue_limit` is not set."""
Label = Literal["main", "subagent", "side", "compaction"]
TRAINED: tuple[Label, ...] = ("main", "subagent", "compaction")
"""The labels of what an agent works with: side calls (titles, commit messages) are not its task."""


class BatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [batch]."""

    groups: Count = 8
    """Groups of rollouts that one train step takes."""
    schedule: Schedule = "windowed"
    """How far sampling runs ahead of training. synchronous: not at all. overlap: one batch is sampled while another is
    trained. windowed: finished groups may overtake slow ones within `window`. strict: groups are trained in the order
    in which they were opened. greedy: in the order in which they finish; stale ones are dropped."""
    window: NotNegative = 0
    """Only for windowed: the groups, from the oldest waiting one, among which a step takes finished ones. 0: 0.3 times
    the queue limit, rounded up."""
    queue_limit: NotNegative = 0
    """Groups that may be open at once: running, finished, or in a step whose weights are not pushed yet. 0: `groups`
    for synchronous, twice that for overlap, else four times."""
    max_staleness: NotNegative | None = None
    """Published steps that a rollout's oldest token may lag behind before the rollout is dropped. Default: the most
    that the schedule allows, so that none is dropped. Required for greedy, which has no bound of its own."""
    stale: Literal["member", "group"] = "member"
    """What a stale rollout takes along. member: only itself; its reward stays in the baseline, and a group is dropped
    when all of its rollouts are stale. group: its whole group."""
    refill: bool = False
    """Skip groups whose rewards are all equal, which teach nothing, and sample others in their place (DAPO's dynamic
    sampling). Tasks that always or never succeed are no longer part of what is trained (docs/schedule.md)."""
    labels: tuple[Label, ...] = TRAINED
    """Completions to learn from, by their purpose; the others are only counted. Completions without a label, which were
    recorded before labels existed, are learned from. Applies to imitation too."""
    max_tokens: Annotated[int, msgspec.Meta(ge=2)] = 32_768
    """Tokens of one micro-batch; this bounds memory. Completions whose paths are longer are not trained."""
    function: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?\Z")] = ""
    """Your function that drops and weighs the rollouts of each batch, as package.module:function (docs/training.md, "A
    function of your own"). Empty: none."""
    patience_seconds: Seconds = 3600.0
    """How long the trainer waits for the groups of a step before it stops, from the beginning of the wait."""

    def __post_init__(self) -> None:
        demand(
            not self.window or self.schedule == "windowed",
            f"batch.window = {self.window} is for batch.schedule = windowed, and that is {self.schedule}; drop one",
        )
        demand(
            self.open_groups >= self.groups,
            f"batch.queue_limit = {self.queue_limit} is below batch.groups = {self.groups}, so that no step could "
            "fill; raise it",
        )
        demand(
            self.schedule != "synchronous" or self.open_groups == self.groups,
            f"batch.queue_limit = {self.queue_limit} is not batch.groups = {self.groups}, which batch.schedule = "
            "synchronous means; drop it, or set the schedule to overlap",
        )
        demand(
            self.window <= self.open_groups,
            f"batch.window = {self.window} is wider than the queue, which holds {self.open_groups} groups "
            "(batch.queue_limit); lower it, or set batch.schedule = greedy for no window at all",
        )
        demand(
            self.max_staleness is not None or self.lag_bound is not None,
            "batch.schedule = greedy needs batch.max_staleness, as nothing else bounds how old a rollout can get; set "
            "it, or choose another schedule",
        )
        demand(
            self.max_staleness is None or self.lag_bound is None or self.max_staleness >= self.lag_bound,
            f"batch.max_staleness = {self.max_staleness} would drop rollouts, which batch.schedule = {self.schedule} "
            f"makes up to {self.lag_bound} steps old: (queue_limit + window - 2) / groups = ({self.open_groups} + "
            f"{self._window} - 2) / {self.groups}, rounded down; raise it, or lower batch.queue_limit",
        )

    @property
    def open_groups(self) -> int:
        """N: how many groups may be open."""
        return self.queue_limit or BATCHES_OPEN[self.schedule] * self.groups

    @property
    def lag_bound(self) -> int | None:
        """The most published steps that a group can lag behind when it is leased; None: no bound (greedy).

        Holds because steps take whole batches and a leased group counts as open until its step's weights are pushed.
        """
        if self._window is None:
            return None
        return 0 if self.open_groups == self.groups else (self.open_groups + self._window - 2) // self.groups

    def rule(self) -> LeaseRule:
        """Return what the pool's scheduler is asked for."""
        allowed = self.lag_bound if self.max_staleness is None else self.max_staleness
        assert allowed is not None  # greedy without max_staleness is refused
        return LeaseRule(
            groups=self.groups,
            window=self._window,
            max_staleness=allowed,
            stale=self.stale,
            refill=self.refill,
        )

    def text(self) -> str:
        """Return the numbers of the schedule in one line."""
        age = "older rollouts are dropped" if self.lag_bound is None else f"none gets over {self.lag_bound} steps old"
        return (
            f"schedule {self.schedule}: groups {self.groups}, window {self._window or 'none'}, queue_limit "
            f"{self.open_groups}, max_staleness {self.rule().max_staleness} ({age})"
        )

    @property
    def _window(self) -> int | None:
        """W; None: no window."""
        if self.schedule == "windowed":
            return self.window or -(-3 * self.open_groups // 10)
        return {"synchronous": self.groups, "overlap": self.groups, "strict": 1, "greedy": None}[self.schedule]
