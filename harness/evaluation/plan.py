"""What is evaluated beside a training run, and which of its versions are due. Pure: no pool, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.agents.mix import Scaffold
from harness.loop import RunPlan
from harness.settings import Settings
from harness.tasks.mix import TaskMix
from harness.tasks.stored import digest_of_tasks


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """What is evaluated, and when."""

    mix: TaskMix
    scaffolds: Sequence[Scaffold]
    """Every agent works at every task once."""
    every: int
    """Train steps from one evaluation to the next."""
    until_step: int
    """The evaluation at this step, or the first one after it, is the last."""
    concurrency: int
    seed: int = 0
    hold: bool = False
    """Ask the trainer to leave one of several engines at the version until its evaluation has ended."""

    @property
    def run_plan(self) -> RunPlan:
        scaffolds = [replace(scaffold, held_out=False) for scaffold in self.scaffolds]  # here they all count
        return RunPlan(
            mix=self.mix, scaffolds=scaffolds, group_size=1, concurrency=self.concurrency, seed=self.seed,
            every_agent=True,
        )  # fmt: skip

    def config(self) -> dict[str, Any]:
        """What evaluations of one training run have in common, or their points could not be compared."""
        return {"tasks": digest_of_tasks(self.mix.tasks), "agents": [scaffold.name for scaffold in self.scaffolds]}


def evaluation_plan(settings: Settings, mix: TaskMix, scaffolds: Sequence[Scaffold]) -> EvaluationPlan:
    """Return the plan of a training run's settings, which name tasks for evaluation."""
    assert settings.until_step is not None  # Settings demands it
    return EvaluationPlan(
        mix=mix,
        scaffolds=scaffolds,
        every=settings.eval_every,
        until_step=settings.until_step,
        concurrency=settings.concurrency,
        seed=settings.seed,
        hold=settings.eval_hold,
    )


def engine_to_hold(engines: Sequence[tuple[str, str | None]], version: str) -> tuple[str, str]:
    """Return the engine to hold at a version, the last of several that serve it, or "" and why there is none.

    `engines`: the URL of each and the version that it serves; None: not known.
    """
    if len(engines) < 2:
        return "", "the proxy has one engine, which must get the new weights"
    serving = [url for url, served in engines if served == version]
    return (serving[-1], "") if serving else ("", f"no engine of the proxy serves {version} any more")


def is_due(step: int, last: int | None, plan: EvaluationPlan) -> bool:
    """Whether the version of this step is to be evaluated, after that of step `last`; None: none was yet."""
    if last is None:
        return True
    return step // plan.every > last // plan.every or last < plan.until_step <= step
