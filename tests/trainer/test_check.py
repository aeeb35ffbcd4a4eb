"""Engine against trainer: the largest gap is told as it is."""

import math
from pathlib import Path

import torch

from tests.trainer.make import make_config, make_rows
from trainer.commands.logprobs import difference
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy


def test_a_gap_that_is_no_number_is_not_passed_over(ranks: Ranks, model: Path, tmp_path: Path) -> None:
    policy, rows = Policy(model, make_config(tmp_path), ranks), make_rows(4)
    whole = difference(policy, rows, 64)
    assert whole["logprob_tokens_compared"] == 20 and 0 < whole["max_abs_logprob_diff"] < math.inf
    with torch.no_grad():
        policy.model.output_layer.weight[:] = math.nan
    assert math.isnan(difference(policy, rows, 64)["max_abs_logprob_diff"])
