"""Rows from rollouts that are in the pool already: for imitation and for checking logprobs."""

from collections import Counter
from functools import partial
from pathlib import Path

from proxy.pool.completions.records import Completion
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.finished_rollouts import Recorded, finished_rollouts
from proxy.pool.untrained import Untrained, UntrainedReason
from trainer.config import Config
from trainer.config.model_shape import read_shape
from trainer.data.assemble import merge, why_not_imitable
from trainer.data.routed_experts import replayed
from trainer.data.row import Row
from trainer.preflight import demand_tokenizer


def demonstrations(config: Config) -> list[list[Row]]:
    """The rows to imitate, by group: members of a group share their task. UserError when there is too little."""
    groups: dict[int, list[Row]] = {}
    pool = open_pool(config.pool)
    why_not = partial(why_not_imitable, labels=config.batch.labels)
    for name in config.sft.runs:
        for rollout in _recorded(pool, name, Path(config.model)):
            if _good_enough(rollout.reward, config.sft.min_reward):
                rows = merge(rollout.completions, 1.0, Counter(), why_not)
                groups.setdefault(rollout.group_id, []).extend(rows)
    found = [rows for rows in groups.values() if rows]
    if len(found) < 2:
        raise UserError(
            f"sft.runs = {list(config.sft.runs)} hold {len(found)} groups to imitate, at least 2 are needed; "
            "record more or lower sft.min_reward"
        )
    return found


def _good_enough(reward: float | None, bound: float | None) -> bool:
    return bound is None or (reward is not None and reward >= bound)


def sampled_by(version: str, config: Config, run: str, excluded: Counter[Untrained]) -> list[Row]:
    """Rows of a run's completions that this version sampled from first to last token; counts the other tokens."""

    def why_not(item: Completion) -> Untrained | None:
        if {span.version for span in item.versions} != {version}:
            return Untrained(UntrainedReason.OTHER_VERSION)
        whole = len(item.logprobs) == len(item.sampled)
        return None if whole else Untrained(UntrainedReason.LOGPROBS_MISSING)

    pool, model = open_pool(config.pool), Path(config.model)
    mixture = replayed(config.loss, read_shape(model))
    found = _recorded(pool, run, model)
    return [row for one in found for row in merge(one.completions, 0.0, excluded, why_not, mixture=mixture)]


def _recorded(pool: Pool, run: str, model: Path) -> list[Recorded]:
    """The finished rollouts of a run; UserError when they are in the tokens of another model."""
    found = finished_rollouts(pool, find_run(pool, run).id)
    demand_tokenizer(pool, model, {item.attempt_id for rollout in found for item in rollout.completions})
    return found
