"""What the demo shows: a table while it learns, summary.json, and the reward curve as text and picture."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from sqlalchemy import func, select

from proxy.pool.database import Pool
from proxy.pool.rollouts.groups import run_summary
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import completions, rollouts
from proxy.pool.training.steps import latest, metrics

BARS = " ▁▂▃▄▅▆▇█"
HEADER = f"{'step':>4}  {'reward':>6}  {'':22}  {'tokens':>6}  {'stale':>5}  {'clipped':>7}  {'grad':>6}"


@dataclass(frozen=True)
class Evaluation:
    """Success on held-out tasks. Episodes without a verdict are counted apart, never as reward 0."""

    mean: float
    episodes: int
    missing: int


class StepTable:
    """Prints a row for every step that the trainer publishes in the pool."""

    def __init__(self, pool: Pool, run_name: str, console: Console):
        self._pool, self._console = pool, console
        self._run_id = find_run(pool, run_name).id
        self._shown = 0
        console.print(HEADER, style="bold")

    def update(self) -> None:
        for row in metrics(self._pool, self._run_id)[1 + self._shown :]:
            self._shown += 1
            self._console.print(step_row(row), highlight=False)


def step_row(row: dict[str, Any]) -> str:
    reward, clipped = (
        row.get("reward_mean"),
        row.get("clip_fraction", 0),
    )  # absent in a step without rewards
    bar, shown = ("", "none") if reward is None else ("█" * round(22 * reward), f"{reward:.3f}")
    return (
        f"{row['step']:>4}  {shown:>6}  {bar:22}  {row['trained_tokens']:>6}"
        f"  {row['staleness_mean']:>5.2f}  {clipped:>7.2%}  {row['grad_norm']:>6.3f}"
    )


def evaluation(pool: Pool, run_name: str) -> Evaluation:
    """Return the mean reward of an evaluation run's episodes that have a verdict. SystemExit when none has."""
    rewards = [row.reward for row in run_summary(pool, find_run(pool, run_name).id)]
    known = [reward for reward in rewards if reward is not None]
    if not known:
        raise SystemExit(f"no episode of {run_name} has a verdict; see its results.jsonl")
    return Evaluation(sum(known) / len(known), len(known), len(rewards) - len(known))


def summary(pool: Pool, train_run: str, before: Evaluation, after: Evaluation) -> dict[str, Any]:
    """Return the figures of summary.json that the pool holds."""
    run_id = find_run(pool, train_run).id
    version = latest(pool, run_id)
    assert version is not None
    trained = metrics(pool, run_id)[1:]
    with pool.read() as connection:
        rollout_count = connection.scalar(select(func.count()).select_from(rollouts))
        total, sampled = connection.execute(
            select(
                func.count(),
                func.sum(func.length(completions.c.sampled) // 4).filter(completions.c.untrainable.is_(None)),
            )
        ).one()
    return {
        "eval_before": before.mean,
        "eval_after": after.mean,
        "eval_episodes": min(before.episodes, after.episodes),
        "eval_missing": before.missing + after.missing,
        "eval_stderr": math.sqrt(sum(e.mean * (1 - e.mean) / e.episodes for e in (before, after))),
        "reward_by_step": [None if "reward_mean" not in row else round(row["reward_mean"], 4) for row in trained],
        "steps": version.step,
        "policy_version": version.name,
        "rollouts": rollout_count,
        "completions": total,
        "trainable_tokens": sampled,
    }


def write_report(directory: Path, figures: dict[str, Any], console: Console) -> None:
    """Write summary.json and reward.png, and print the reward curve."""
    (directory / "summary.json").write_text(json.dumps(figures, indent=2) + "\n")
    draw(directory / "reward.png", figures)
    curve = (
        "." if reward is None else BARS[round(8 * max(0.0, min(1.0, reward)))] for reward in figures["reward_by_step"]
    )
    console.print("\nreward by step   " + "".join(curve))
    console.print(
        f"held-out success {figures['eval_before']:.3f} -> {figures['eval_after']:.3f} "
        f"(+-{figures['eval_stderr']:.3f}, {figures['eval_episodes']} episodes each)\n"
        f"engine against trainer: at most {figures['max_abs_logprob_diff']:.1e} apart over "
        f"{figures['logprob_tokens_compared']} logprobs\n"
        f"{figures['rollouts']} rollouts, {figures['completions']} completions in {figures['wall_seconds']:.0f} s\n"
        f"picture: {directory / 'reward.png'}   summary: {directory / 'summary.json'}",
        highlight=False,
    )


def draw(path: Path, figures: dict[str, Any]) -> None:
    import matplotlib  # slow to import, and needed once at the end

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    steps = range(1, len(figures["reward_by_step"]) + 1)
    axes.plot(steps, figures["reward_by_step"], label="reward of the step's rollouts")
    ends = [0, len(figures["reward_by_step"])]
    axes.errorbar(
        ends, [figures["eval_before"], figures["eval_after"]], figures["eval_stderr"], fmt="o", label="held-out success"
    )
    axes.set(xlabel="train step", ylabel="mean reward", ylim=(0, 1))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120, bbox_inches="tight")
