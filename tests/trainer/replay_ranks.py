"""What two ranks compute with replayed experts: `torchrun --nproc-per-node 2 -m tests.trainer.replay_ranks MODEL OUT`.

One update on fixed rows for each split: its loss, gradient norm and metrics of the replay, as JSON.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tests.trainer.make import VOCABULARY, make_config
from tests.trainer.test_tree import rows_of
from tests.trainer.two_ranks import BUDGET, RULE
from trainer.config import Parallel
from trainer.config.model_shape import ExpertShape
from trainer.data.packing import plan
from trainer.data.routed_experts import UNKNOWN
from trainer.data.row import TrainingRow
from trainer.loss.policy_loss import policy_loss
from trainer.megatron.parallel import Ranks, job, split
from trainer.policy import Policy

MIXTURE = ExpertShape(count=8, per_token=3, ffn=16, normalised=True, layers=(True, True))
REPLAY = {"loss": {"routing": "replay"}}


def drawn(rng: np.random.Generator, tokens: int) -> np.ndarray:
    """[tokens, layers, experts per token] distinct experts, in rising order."""
    order = rng.random((tokens, len(MIXTURE.layers), MIXTURE.count)).argsort(axis=-1)
    return np.sort(order[..., : MIXTURE.per_token].astype(np.int16), axis=-1)


def routed(rows: Sequence[TrainingRow], seed: int = 0) -> list[TrainingRow]:
    """Rows with experts. Rows that begin alike mostly have the same experts there; some are unknown."""
    rng, known = np.random.default_rng(seed), dict[tuple[int, ...], np.ndarray]()
    rows_with_experts = []
    for row in rows:
        choices = np.concatenate(
            [
                known.setdefault((*row.tokens[: at + 1].tolist(), int(rng.random() < 0.1)), drawn(rng, 1))
                for at in range(len(row.tokens))
            ]
        )
        choices[rng.random(len(choices)) < 0.1] = UNKNOWN
        rows_with_experts.append(replace(row, experts=choices))
    return rows_with_experts


SPLITS: dict[str, dict[str, Any]] = {
    "data": {},
    "tensor": {"tensor": 2, "recompute": True},
    "context": {"context": 2},
    "pipeline": {"pipeline": 2, "recompute": True},
    "experts": {"expert": 2},
}


def learn(model: Path, parallel: dict[str, Any], ranks: Ranks, parts: int = 1) -> dict[str, float]:
    """The same rows on any number of ranks, in the micro-batches of `parts` data-parallel ranks."""
    config = make_config(model.parent, parallel={"processes": ranks.world, **parallel}, **REPLAY)
    policy = Policy(model, config, ranks)
    rows = routed([*rows_of(1, vocabulary=VOCABULARY, longest=30), *rows_of(3, vocabulary=2, longest=20)])
    planned = plan(rows, max(parts, ranks.data_world), BUDGET)
    micros = planned[ranks.data_rank] if ranks.data_world > 1 else [micro for part in planned for micro in part]
    update = policy.update(micros, sum(len(row.places) for row in rows), partial(policy_loss, rule=RULE), 1e-2)
    return {"loss": update.loss, "grad_norm": update.grad_norm, **update.routing}


if __name__ == "__main__":
    with job() as device:
        for name, chosen in SPLITS.items():
            with split(msgspec.convert({"processes": 2, **chosen}, Parallel), device) as ranks:
                learned = learn(Path(sys.argv[1]), chosen, ranks)
                if ranks.rank == 0:
                    Path(sys.argv[2], name).write_bytes(msgspec.json.encode(learned))
