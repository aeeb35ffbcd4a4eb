"""What the rollouts of a run share, and what each has of its own."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.agents.base import Agent
from harness.async_pool import AsyncPool
from harness.failure import AttemptFailed
from harness.integrity.watch import IntegrityWatch
from harness.monitor.engine_presence import EnginePresence
from harness.rewards.scorer import Scorer
from harness.tasks import Task
from harness.tasks.verdict_options import Augment
from harness.verdict.judge import Judge
from proxy.pool.rollouts.groups import OpenRollout, Outcome
from proxy.pool.rollouts.prompt_variations import PromptKind
from sandboxes.base import Sandboxes


class StageSlots:
    """How many attempts of a run may be in each stage at once."""

    def __init__(self, *, starting: int, agents: int, verifying: int):
        self.starting = asyncio.Semaphore(starting)
        self.agents = asyncio.Semaphore(agents)
        self.verifying = asyncio.Semaphore(verifying)


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Upper bounds that a run sets for each attempt; a task may set lower ones."""

    seconds: float | None = None
    turns: int | None = None
    tokens: int | None = None
    hung_seconds: float = 3600
    """Seconds without a model call that ends and without output of the agent, before the agent counts as hung."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What all rollouts of a run share. What one rollout has of its own is in its `RolloutJob`."""

    pool: AsyncPool
    sandboxes: Sandboxes
    url: str
    """Base URL of the model, ending in /v1."""
    model: str
    context_length: int
    logs: Path
    trouble: Callable[[], Awaitable[AttemptFailed | None]]
    """Asks the proxy whether it or its engine is out of order."""
    end_calls: Callable[[Collection[int]], Coroutine[Any, Any, None]]
    """Has the proxy end the calls of these attempts, and record what they have sampled."""
    engine: EnginePresence
    owner: str = ""
    """Token of this harness's claim on the run. Only while it owns the run it closes what is open there."""
    slots: StageSlots = field(default_factory=lambda: StageSlots(starting=64, agents=64, verifying=64))
    budgets: Budgets = Budgets()
    judge: Judge | None = None
    """Grades answers where a task's checker is a judge."""
    pause_seconds: float = 1.0
    """Seconds before the first retry; each further pause is four times as long."""
    augment: Augment | None = None
    """Variations of the environment for tasks that declare none."""
    prompt_kinds: tuple[PromptKind, ...] = ()
    """Kinds of variations of what the model is shown."""
    seed: int = 0
    """Seed of the choice of variations."""
    scorer: Scorer | None = None
    """Gives rollouts their rewards after the verifier. None: the verifier's verdict is the reward."""
    integrity: IntegrityWatch | None = None
    """How rollouts that cheat are treated. None: nobody looks whether they do."""
    remote_attempt: "Callable[[RunContext, RolloutJob], Awaitable[Outcome]] | None" = None
    """Makes an attempt on another machine, as `make_attempt` does here (`--ray`)."""


@dataclass
class Cancellation:
    """Why a rollout is cancelled, when it is not because the run ends."""

    reason: str | None = None
    """redundant, filtered or called_off."""


@dataclass(frozen=True)
class RolloutJob:
    """What one rollout has of its own: its row, its task, its agent, and why it is cancelled."""

    rollout: OpenRollout
    task: Task
    agent: Agent
    cancellation: Cancellation = field(default_factory=Cancellation)
