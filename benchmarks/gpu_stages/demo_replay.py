"""Stage 5: 20 train steps of a demo once more, on the rollouts that it recorded, in fp32 and in bf16.

benchmarks/demo_rollouts/demo.tar.xz has them, with the weights that the demo began with and the metrics of its steps,
which ran on a CPU in fp32. The same groups make each step, so losses may differ by what device and precision round, and
by what steps before add to that.
"""

import tarfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_stages.scene import Scene, one_rank
from proxy.pool.database import Pool, open_pool
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.steps import metrics
from proxy.pool.training.windowed_fifo import of_step
from trainer.config import Config, load_config
from trainer.config.step import step_options
from trainer.data.assemble import assemble
from trainer.data.packing import key_cost, plan
from trainer.loss.named_losses import configured
from trainer.loss.policy_loss import policy_loss, read_sums
from trainer.megatron.optimizer import learning_rate
from trainer.megatron.parallel import Ranks
from trainer.policy import LossInput, Policy

ARCHIVE = Path(__file__).parents[1] / "demo_rollouts" / "demo.tar.xz"
COMPARED = ("loss", "grad_norm", "entropy", "kl_rollout")
WAYS = {
    "float32": [],
    "bfloat16": ["parallel.precision='bfloat16'"],
    "bfloat16_head_float32": ["parallel.precision='bfloat16'", "parallel.head_float32=true"],
}
"""Settings of each replay."""


def figures(scene: Scene) -> Iterator[dict[str, Any]]:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(scene.directory, filter="data")
    pool = open_pool(str(scene.directory / "pool.db"))
    with one_rank() as ranks:
        for name, settings in WAYS.items():
            config = load_config(scene.directory / "trainer.toml", settings)
            yield {name: scene.tried(partial(replay, pool, config, ranks))}


def replay(pool: Pool, config: Config, ranks: Ranks) -> dict[str, Any]:
    """Train on the recorded groups, step by step, and compare with the metrics of the demo."""
    run_id = find_run(pool, config.run).id
    recorded = metrics(pool, run_id)[1:]
    policy = Policy(Path(config.model), config, ranks)
    replayed: list[dict[str, float]] = []
    gaps: list[float] = []
    for row in recorded:
        step = int(row["step"])
        batch = assemble(of_step(pool, run_id, step), step_options(config, step))
        micros = plan(batch.rows, 1, config.batch.max_tokens, key_cost(policy.shape))[0]
        loss = partial(policy_loss, rule=configured(config.loss))
        update = policy.update(micros, batch.tokens, loss, learning_rate(config.optimizer, step, config.steps))
        assert update.sums is not None
        replayed.append({"loss": update.loss, "grad_norm": update.grad_norm} | read_sums(update.sums))
        gaps.append(largest_gap(update.loss_inputs))
    return {
        "steps": len(replayed),
        "largest_difference": {
            name: float(np.max([abs(ours[name] - row[name]) for ours, row in zip(replayed, recorded, strict=True)]))
            for name in COMPARED
        },
        "loss": [ours["loss"] for ours in replayed],
        "recorded_loss": [row["loss"] for row in recorded],
        "logprob_gap_first_step": gaps[0],
        "logprob_gap": gaps,
    }


def largest_gap(inputs: Sequence[LossInput]) -> float:
    """The largest difference between the engine's and the trainer's logprob of a token.

    In the first step both have the same weights; later rollouts may be of older ones.
    """
    return max(float((one.logp - one.tokens.rollout_logp).abs().max()) for one in inputs if len(one.logp))
