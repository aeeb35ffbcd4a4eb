"""Makes the scorer that a run or a command names: `module:function`, or the path of a judge file."""

from pathlib import Path

from harness.async_pool import AsyncPool
from harness.rewards.function import RewardFunction
from harness.rewards.judge_file import load_judge_file
from harness.rewards.judges import TrajectoryJudges
from harness.rewards.scorer import Scorer
from proxy.pool.errors import UserError

SUFFIX = ".toml"
"""How a judge file's name ends."""


def scorer_named(name: str, pool: AsyncPool) -> Scorer:
    """Make a scorer; UserError when there is none of this name or it cannot be used."""
    if name.endswith(SUFFIX):
        return TrajectoryJudges(Path(name).name, load_judge_file(Path(name)), pool)
    module, colon, function = name.partition(":")
    if not (colon and module and function):
        raise UserError(
            f"reward = {name} names neither a function nor judges; write package.module:function or FILE.toml"
        )
    return RewardFunction(name)
