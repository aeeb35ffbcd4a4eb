"""The whole loop on two stages: it learns what one rank learns, and survives kill -9 of the stage with the loss.

Left out: gradients, weights and checkpoints of stages, which tests/trainer/test_ranks.py holds.
"""

from pathlib import Path

import pytest

from tests.trainer.lives import End, Lives
from tests.trainer.test_crashes import STEPS, killed, launch
from tests.trainer.test_loop import metrics, prepare, query
from tests.trainer.test_weights import same_files

ENDS = [End("return", "Policy.update", rank=1), End("c_call", "fsync", 2, rank=1), End("return", "Policy.write_hf")]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_loop_on_two_stages_survives_and_learns_what_one_rank_learns(lives: Lives, tmp_path: Path) -> None:
    one, smooth, rough = (prepare(tmp_path / name, groups=2 * STEPS) for name in ("one", "smooth", "rough"))
    assert lives.live(*launch(one, 1)) == [0], lives.log_end()
    stages = ["--set", "parallel.pipeline=2"]
    assert lives.live(*launch(smooth, 2), *stages, ranks=2) == [0, 0], lives.log_end()
    for end in ENDS:
        assert killed(lives.live(*launch(rough, 2), *stages, ranks=2, end=end), end), (end, lives.log_end())
    assert lives.live(*launch(rough, 2), *stages, ranks=2) == [0, 0], lives.log_end()
    alone, undisturbed, resumed = ([row["loss"] for row in metrics(where)[1:]] for where in (one, smooth, rough))
    assert resumed == undisturbed == pytest.approx(alone, rel=1e-3)
    steps = query(rough, "select state, step from groups order by queue_index")
    assert steps == [("CONSUMED", 1 + index // 2) for index in range(2 * STEPS)]
    last = f"out/models/step-{STEPS:06d}"
    assert same_files(rough / last, smooth / last)
