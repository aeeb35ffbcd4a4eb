"""What everything did, part by part: figures of the pool, the trainer's metrics, the proxy, the engine and the harness.

Nothing here is what the recipe wished for: each figure was counted by the part itself, or is a query of the pool.
"""

import json
from collections import Counter
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import func, select, text

from harness.monitor.metrics import METRICS
from harness.run_dir import RunDir
from proxy.pool.database import Pool
from proxy.pool.inspect.account import account
from proxy.pool.inspect.verify import verify
from proxy.pool.rollouts.runs import find_run
from proxy.pool.schema import attempts, completions, groups, rollouts
from proxy.pool.training.steps import history, metrics, versions

RUN = "everything"
FAR = 1 << 30
"""Stands for the step of a group that no step has taken yet."""
BY_NAME = {
    "calls_by_dialect": ("chat_completions", "responses", "messages", "gemini"),
    "rollouts_by_agent": ("mini-swe-agent", "codex", "messages-script", "gemini-script", "one-call"),
    "groups_by_domain": ("agent", "qa"),
    "groups_dropped": ("equal_rewards",),
    "stale_rollouts": (),
}
"""Figures with a part for each name, and the names that must be among them. Without names: any."""
POSITIVE = (
    "steps", "pushes", "groups", "sandboxes_in_docker", "tokens_trained", "tokens_shared", "tokens_joined",
    "groups_out_of_order", "calls_while_training", "left_out", "sampled", "verified_completions",
)  # fmt: skip
ZERO = ("unaccounted", "damages")
"""Figures that must be 0."""


def report(pool: Pool, directory: Path, engine: str, gateway: str) -> dict[str, Any]:
    """Return the figures of a run that has ended, while engine and proxy are still up."""
    run_id = find_run(pool, RUN).id
    checked, placed = verify(pool), account(pool, run_id)
    with pool.read() as connection:
        database = str(connection.scalar(text("select version()"))).split(" (")[0]
    return {
        "date": date.today().isoformat(),
        "engine": _engine(engine),
        "database": database,
        **_steps(pool, run_id),
        "rollouts_by_agent": _rollouts_by_agent(pool, run_id),
        "calls_by_dialect": _counted(_get(f"{gateway}/metrics"), "blackforge_calls_answered_total", "dialect"),
        "sandboxes_in_docker": _sandboxes(directory),
        "groups_out_of_order": _out_of_order(pool, run_id),
        "stale_rollouts": _stale(pool, run_id),
        "calls_while_training": _calls_while_training(pool, run_id),
        "groups_dropped": _dropped(pool, run_id),
        "attempts_retried": _retried(pool, run_id),
        "sampled": placed.sampled,
        "left_out": {reason: tally.tokens for reason, tally in placed.left_out.items() if tally.tokens},
        "waiting": {place: tally.tokens for place, tally in placed.waiting.items() if tally.tokens},
        "unaccounted": placed.unaccounted,
        "verified_completions": checked.completions,
        "damages": len(checked.damages),
    }


def _engine(url: str) -> str:
    server, model = (json.loads(_get(f"{url}/{page}")) for page in ("server_info", "model_info"))
    return f"SGLang {server['version']} on {server['device']}, serving {model['weight_version']}"


def _get(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        return answer.read().decode()


def _counted(page: str, name: str, label: str) -> dict[str, int]:
    """Return the samples of a metric by one of its labels."""
    samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
    counts = Counter[str]()
    for sample in samples:
        if sample.name == name:
            counts[sample.labels[label]] += int(sample.value)
    return dict(sorted(counts.items()))


def _sandboxes(directory: Path) -> int:
    """Count the sandboxes that the harness has started, if they are Docker's: those for agents and for verdicts."""
    run = RunDir(directory / "runs" / RUN)
    starts = _counted((run.path / METRICS).read_text(), "blackforge_sandbox_start_seconds_count", "host")
    return sum(starts.values()) if run.sandbox() == "docker" else 0


def _steps(pool: Pool, run_id: int) -> dict[str, Any]:
    """Sum up the metrics of the steps."""
    steps = metrics(pool, run_id)[1:]
    names = ("trained_tokens", "call_tokens", "flat_tokens", "computed_tokens")
    trained, calls, flat, computed = (sum(step.get(name, 0) for step in steps) for name in names)
    return {
        "steps": len(steps),
        "pushes": sum(version.pushed_at is not None for version in versions(pool, run_id)),
        "groups": sum(step["groups"] for step in steps),
        "groups_by_domain": dict(sum((Counter(step["groups_by_domain"]) for step in steps), Counter())),
        "reward_by_step": [round(step["reward_mean"], 4) if "reward_mean" in step else None for step in steps],
        "tokens_trained": trained,
        "tokens_of_calls": calls,
        "tokens_joined": calls - flat,
        "tokens_shared": flat - computed,
        "tokens_computed": computed,
        "share_shared": round(1 - computed / max(1, flat), 4),
    }


def _rollouts_by_agent(pool: Pool, run_id: int) -> dict[str, int]:
    """Count the rollouts with a reward in groups that a step has trained, by the agent of their group."""
    trained = (groups.c.run_id == run_id) & (groups.c.state == "CONSUMED") & rollouts.c.reward.is_not(None)
    query = select(groups.c.agent, func.count()).join_from(groups, rollouts).where(trained).group_by(groups.c.agent)
    with pool.read() as connection:
        return {agent: count for agent, count in connection.execute(query.order_by(groups.c.agent))}


def _dropped(pool: Pool, run_id: int) -> dict[str, int]:
    """Count the groups that no step takes, by reason."""
    dropped = (groups.c.run_id == run_id) & (groups.c.state == "TOMBSTONE")
    query = select(groups.c.reason, func.count()).where(dropped).group_by(groups.c.reason).order_by(groups.c.reason)
    with pool.read() as connection:
        return {reason: count for reason, count in connection.execute(query)}


def _retried(pool: Pool, run_id: int) -> dict[str, int]:
    """Count the attempts in whose place another one was made, by their failure."""
    replaced = (attempts.c.run_id == run_id) & (attempts.c.id < rollouts.c.attempt_id)
    query = select(attempts.c.failure, func.count()).join_from(attempts, rollouts).where(replaced)
    with pool.read() as connection:
        return {failure: count for failure, count in connection.execute(query.group_by(attempts.c.failure))}


def _out_of_order(pool: Pool, run_id: int) -> int:
    """Count the groups that were trained before one which had been opened earlier."""
    queued = (groups.c.run_id == run_id) & groups.c.position.is_not(None) & (groups.c.state != "TOMBSTONE")
    query = select(func.coalesce(groups.c.step, FAR)).where(queued).order_by(groups.c.position)
    with pool.read() as connection:
        steps = list(connection.scalars(query))
    return sum(step < FAR and any(earlier > step for earlier in steps[:n]) for n, step in enumerate(steps))


def _stale(pool: Pool, run_id: int) -> dict[str, int]:
    """Count the rollouts that were trained, by how many steps their oldest weights were behind those that they changed.

    Those that the newest weights sampled are left out.
    """
    step_of = {version.name: version.step for version in versions(pool, run_id)}
    trained = (groups.c.run_id == run_id) & (groups.c.state == "CONSUMED") & (rollouts.c.trainable_tokens > 0)
    query = select(groups.c.step, rollouts.c.versions).join_from(groups, rollouts).where(trained)
    with pool.read() as connection:
        ages = [
            (step, [step_of[name] for name in names if name in step_of]) for step, names in connection.execute(query)
        ]
    lags = Counter(step - 1 - min(known) for step, known in ages if known)
    return {f"{lag} behind": lags[lag] for lag in sorted(lags) if lag}


def _calls_while_training(pool: Pool, run_id: int) -> int:
    """Count the calls that were sampled, at least in part, while a step was trained or written to disk."""
    busy = [
        (version.created_at - step["seconds"]["train"] - step["seconds"]["checkpoint"], version.created_at)
        for version, step in history(pool, run_id)[1:]
    ]
    query = select(completions.c.started_at, completions.c.finished_at).join_from(completions, attempts)
    with pool.read() as connection:
        calls = connection.execute(query.where(attempts.c.run_id == run_id)).all()
    return sum(any(began < end and ended > start for start, end in busy) for began, ended in calls)


def absent(figures: Mapping[str, Any]) -> list[str]:
    """Return the figures that must be above 0 and are not, and those that must be 0 and are not."""
    lacking = [name for name in POSITIVE if not _total(figures[name])]
    for name, parts in BY_NAME.items():
        lacking += [f"{name} {part}".strip() for part in parts or figures[name] or ("",) if not figures[name].get(part)]
    return lacking + [name for name in ZERO if figures[name]]


def _total(figure: Any) -> float:
    return sum(figure.values()) if isinstance(figure, dict) else figure


def table(figures: Mapping[str, Any]) -> str:
    """Return the report as lines of a table."""
    width = max(map(len, figures))
    return "\n".join(f"{name.replace('_', ' '):{width}}  {_shown(value)}" for name, value in figures.items())


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {part}" for name, part in value.items()) or "none"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
