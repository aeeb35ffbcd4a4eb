"""What a step trained on, for people: its rollouts, their sequences, and the text and coefficient of each token.

Reads the pool, the model's tokenizer and the record of the step's tokens (trainer/report/tokens.py). Without the record
the batch is assembled again, and the ratios, which only the trainer knew, are missing. Not here: how it is drawn
(trainer/report/terminal.py, trainer/report/html.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from proxy.pool.browse.tokens.texts import texts
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import paths
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.steps import Version, history, scales_before
from proxy.pool.training.windowed_fifo import LeasedGroup, LeasedRollout, of_step
from proxy.pool.untrained import Untrained, UntrainedReason
from trainer.config import Config
from trainer.config.step import step_options
from trainer.credit.assign import group_credits
from trainer.data.assemble import assemble, why_not_trainable
from trainer.report import tokens
from trainer.report.tokens import TrainedSequence


@dataclass(frozen=True)
class TokenView:
    """One token of a sequence."""

    id: int
    text: str
    version: str | None = None
    """The weights that sampled it. None: it is part of a prompt."""
    coefficient: float | None = None
    """The same as in trainer/report/tokens.py. None: the token was not trained."""
    advantage: float | None = None
    logp: float | None = None
    rollout_logp: float | None = None


@dataclass(frozen=True)
class SequenceView:
    """One sequence, or the sampled tokens of a completion that was not trained."""

    title: str
    tokens: list[TokenView]
    reason: str | None = None
    """Why nothing of it was trained."""


@dataclass(frozen=True)
class RolloutView:
    """One rollout."""

    title: str
    sequences: list[SequenceView]


@dataclass(frozen=True)
class StepView:
    """One step."""

    title: str
    notes: list[str]
    """What a reader has to know about the figures."""
    strongest: float
    """The largest |coefficient| of the step; brightness is relative to it."""
    rollouts: Iterator[RolloutView]


@dataclass(frozen=True)
class StepSource:
    """What a view of a step is made from."""

    groups: list[LeasedGroup]
    trained: list[TrainedSequence]
    dropped: list[Untrained | None]
    """Why each group taught nothing; None where it did."""
    tokenizer: Tokenizer | None
    excluded: Mapping[int, Untrained]
    """Id of each completion that the pool alone excludes -> why."""


def view(config: Config, step: int, only: int | None = None) -> StepView:
    """Return the view of a step of the configured run, or of one rollout. Raises UserError when it was not trained."""
    pool = open_pool(config.pool)
    metrics = _metrics(pool, config, step)
    groups = of_step(pool, find_run(pool, config.run).id, step)
    known = [member.rollout_id for group in groups for member in group.rollouts]
    if only is not None and only not in known:
        raise UserError(f"step {step} has no rollout {only}; it has: {', '.join(map(str, known))}")
    tokenizer = _tokenizer(Path(config.model))
    scales = scales_before(pool, find_run(pool, config.run).id, step)
    sequences, notes = _trained_sequences(config, groups, step, scales)
    options = step_options(config, step, scales=scales)
    completions = [item for group in groups for member in group.rollouts for item in member.completions]
    source = StepSource(
        groups=groups,
        trained=sequences,
        dropped=[share.dropped for share in group_credits(groups, options)],
        tokenizer=tokenizer,
        excluded={
            item.id: why for item in completions if (why := why_not_trainable(item, options.labels, options.max_tokens))
        },
    )
    if tokenizer is None:
        notes.append(f"{config.model}/tokenizer.json cannot be read: tokens are shown as their ids")
    strongest = max((float(np.abs(row.coefficient).max()) for row in sequences if len(row.coefficient)), default=0.0)
    return StepView(_title(config, step, metrics), notes, strongest, _rollouts(source, only))


def _metrics(pool: Pool, config: Config, step: int) -> dict[str, object]:
    versions: list[tuple[Version, dict[str, object]]] = history(pool, find_run(pool, config.run).id)
    for version, metrics in versions:
        if version.step == step and step > 0:
            return {"version": version.name} | metrics
    newest = versions[-1][0].step if versions else 0
    trained = f"its steps are 1 to {newest}" if newest else "it has trained none yet"
    raise UserError(f"run {config.run!r} has not trained step {step}; {trained}")


def _title(config: Config, step: int, metrics: Mapping[str, object]) -> str:
    names = ("reward_mean", "groups", "sampled_tokens", "trained_tokens", "loss", "grad_norm")
    text = "  ".join(f"{name} {_short(metrics[name])}" for name in names if name in metrics)
    for name in ("excluded_tokens", "masked_tokens"):
        counts = metrics.get(name)
        if isinstance(counts, Mapping) and counts:
            text += f"  {name} " + ", ".join(f"{count} ({reason})" for reason, count in counts.items())
    return f"run {config.run}, step {step} -> {metrics['version']}  {text}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _tokenizer(model: Path) -> Tokenizer | None:
    try:
        return Tokenizer.from_file(str(model / "tokenizer.json"))
    except Exception:  # the library raises its own bare Exception for a file that is missing or malformed
        return None


def _trained_sequences(
    config: Config, groups: Sequence[LeasedGroup], step: int, scales: dict[str, Any] | None
) -> tuple[list[TrainedSequence], list[str]]:
    path = tokens.path(Path(config.output), step)
    try:
        return tokens.read(path), []
    except FileNotFoundError:
        note = (
            f"there is no record {path}, as those of the newest {tokens.KEPT_STEPS} steps are kept: the batch is "
            "assembled again from the pool with the current configuration, colours show the advantage, and the ratios "
            "are not known"
        )
    rows = assemble(groups, step_options(config, step, scales=scales)).rows
    return [
        TrainedSequence(
            completions=row.completions,
            places=row.places,
            segment=row.segment[row.places],
            advantage=row.advantage[row.places],
            logp=None,
            coefficient=row.advantage[row.places],
        )
        for row in rows
    ], [note]


def _rollouts(source: StepSource, only: int | None) -> Iterator[RolloutView]:
    by_last = {row.completions[-1]: row for row in source.trained if row.completions}
    for group, dropped in zip(source.groups, source.dropped, strict=True):
        for member in group.rollouts:
            if only is None or member.rollout_id == only:
                rows = [by_last[item.id] for item in member.completions if item.id in by_last]
                yield RolloutView(_heading(group, member), list(_sequences(source, member, rows, dropped)))


def _heading(group: LeasedGroup, member: LeasedRollout) -> str:
    reward = "missing" if member.reward is None else f"{member.reward:g}"
    reason = f"  not trained: {member.untrained}" if member.untrained is not None else ""
    task = group.task.get("id", "")
    return (
        f"rollout {member.rollout_id}  group {group.queue_index}, member {member.member}, task {task}  "
        f"reward {reward}  staleness {member.staleness}{reason}"
    )


def _sequences(
    source: StepSource, member: LeasedRollout, rows: Sequence[TrainedSequence], dropped: Untrained | None
) -> Iterator[SequenceView]:
    decode = partial(texts, source.tokenizer)
    items = {item.id: item for item in member.completions}
    whole = _paths(member.completions)
    for row in rows:
        versions = list(dict.fromkeys(span.version for name in row.completions for span in items[name].versions))
        scores = sorted({round(float(value), 4) for value in row.advantage})
        title = (
            f"completions {', '.join(f'#{name}' for name in row.completions)} of {', '.join(versions)}  advantage "
            f"{' '.join(f'{score:+.3g}' for score in scores[:4])}{' ...' if len(scores) > 4 else ''}  "
            f"{len(row.places)} of {len(whole[row.completions[-1]])} tokens trained"
        )
        yield SequenceView(title, _tokens(row, items, whole[row.completions[-1]], decode))
    trained = {name for row in rows for name in row.completions}
    for item in member.completions:
        if item.id not in trained and len(item.sampled):
            reason = member.untrained or source.excluded.get(item.id)
            why = str(reason or dropped or Untrained(UntrainedReason.CHECKSUM))
            views = [TokenView(name, text) for name, text in zip(item.sampled, decode(item.sampled), strict=True)]
            yield SequenceView(
                f"#{item.id} {item.label or ''}  {len(item.sampled)} tokens not trained: {why}", views, why
            )


def _paths(chain: Sequence[Completion]) -> Mapping[int, Sequence[int]]:
    try:
        return paths(chain)
    except ValueError:  # damaged rows, which were not trained either
        return {}


def _tokens(
    row: TrainedSequence, items: Mapping[int, Completion], path: Sequence[int], decode: "partial[list[str]]"
) -> list[TokenView]:
    places = {int(place): index for index, place in enumerate(row.places)}
    versions: dict[int, str] = {}
    reported: dict[int, float] = {}
    for name in row.completions:
        item = items[name]
        for span in item.versions:
            versions |= dict.fromkeys(
                range(item.prompt_length + span.start, item.prompt_length + span.end), span.version
            )
        own = [item.prompt_length + place for place in item.sampled_places()]
        reported |= dict(zip(own, item.logprobs, strict=False))
    views = []
    for place, (name, text) in enumerate(zip(path, decode(path), strict=True)):
        at = places.get(place)
        views.append(
            TokenView(
                id=name,
                text=text,
                version=versions.get(place),
                coefficient=None if at is None else float(row.coefficient[at]),
                advantage=None if at is None else float(row.advantage[at]),
                logp=None if at is None or row.logp is None else float(row.logp[at]),
                rollout_logp=reported.get(place),
            )
        )
    return views
