"""Rows from rollouts that the pool already holds: to imitate them and to compare logprobs."""

from collections import Counter
from pathlib import Path

from proxy.pool.completions.records import Completion
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import Run, find_run
from proxy.pool.training.evaluations import find_teacher
from proxy.pool.training.finished_rollouts import RecordedRollout, finished_rollouts
from proxy.pool.untrained import Untrained, UntrainedReason
from trainer.config import Config
from trainer.config.model_shape import read_shape
from trainer.data import imitation
from trainer.data.assemble import merge
from trainer.data.routed_experts import replayed
from trainer.data.row import TrainingRow
from trainer.preflight import demand_tokenizer


def demonstrations(config: Config) -> list[list[TrainingRow]]:
    """Return the rows to imitate, by group, since the members of a group share their task.

    Raises UserError when fewer than two groups have any, or a row is too long for a micro-batch.
    """
    pool = open_pool(config.pool)
    teachers = [find_teacher(pool, name) for name in config.sft.runs]
    rollouts = [rollout for run in teachers for rollout in _finished(pool, run, Path(config.model))]
    filled = list(imitation.demonstrations(rollouts, config.sft.min_reward, config.batch.labels).values())
    if len(filled) < 2:
        raise UserError(
            f"sft.runs = {list(config.sft.runs)} hold {len(filled)} groups to imitate, at least 2 are needed; "
            "record more or lower sft.min_reward"
        )
    longest, limit = max(row.inputs for rows in filled for row in rows), config.batch.max_tokens
    if longest > limit:
        raise UserError(
            f"sft.runs = {list(config.sft.runs)} have a path of {longest} tokens to imitate; raise "
            f"batch.max_tokens = {limit}"
        )
    return filled


def sampled_by(version: str, config: Config, run: str, excluded: Counter[Untrained]) -> list[TrainingRow]:
    """Return rows of a run's completions that this version sampled from the first to the last token.

    Leaves out what training never takes: where a grammar or other sampling parameters changed the distribution, the
    engine's logprobs are not the model's. `excluded` counts the sampled tokens that are left out by reason.
    """

    def why_not(item: Completion) -> Untrained | None:
        if {span.version for span in item.versions} != {version}:
            return Untrained(UntrainedReason.OTHER_VERSION)
        if item.untrainable is not None:
            return item.untrainable
        whole = len(item.logprobs) == item.sampled_count
        return None if whole else Untrained(UntrainedReason.LOGPROBS_MISSING)

    pool, model = open_pool(config.pool), Path(config.model)
    mixture = replayed(config.loss, read_shape(model))
    rollouts = _finished(pool, find_run(pool, run), model)
    return [row for one in rollouts for row in merge(one.completions, 0.0, excluded, why_not, mixture=mixture)]


def _finished(pool: Pool, run: Run, model: Path) -> list[RecordedRollout]:
    """Return a run's finished rollouts. Raises UserError when another model's tokenizer made their tokens."""
    rollouts = finished_rollouts(pool, run.id)
    demand_tokenizer(pool, model, {item.attempt_id for rollout in rollouts for item in rollout.completions})
    return rollouts
