"""An exported model is the same model in Megatron, transformers and SGLang, whatever its family."""

from collections import Counter
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from shutil import copyfile

import numpy as np
import pytest

from proxy.config import EngineConfig
from proxy.engine.sglang import Sglang
from proxy.engine.tiny_model import make_tiny_model
from proxy.pool.completions.records import Completion
from tests.conftest import need
from tests.trainer.hugging import transformers_gap
from tests.trainer.make import FAMILIES, VOCABULARY, make_config, make_rows, write_model
from tests.trainer.test_engine import completion, generate
from trainer.commands.logprobs import difference
from trainer.data.assemble import merge
from trainer.data.row import TrainingRow
from trainer.loss.named_losses import rule_of
from trainer.loss.policy_loss import policy_loss
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy

TOLERANCE = 1e-5
LOADABLE = [name for name in FAMILIES if name not in ("mimo", "qwen3_moe_head", "qwen3_moe_mixed")]
"""Transformers knows no MTP heads, and with them no mimo; SGLang's qwen3_moe has no dense layers."""


def trained(family: str, ranks: Ranks, directory: Path) -> Path:
    """A model of this family after one update, exported, with a tokenizer as SGLang wants it."""
    make_tiny_model(directory / "model")
    write_model(directory / "weights", family)
    for name in ("config.json", "model.safetensors"):
        copyfile(directory / "weights" / name, directory / "model" / name)
    policy = Policy(directory / "model", make_config(directory), ranks)
    rows, loss = make_rows(4), partial(policy_loss, rule=rule_of("cispo", 0.0, 5.0))
    assert policy.update([rows], sum(len(row.places) for row in rows), loss, 1e-2).grad_norm > 0
    policy.write_hf(directory / "exported")
    return directory / "exported"


def sampled(url: str) -> list[TrainingRow]:
    """Rows of what the engine samples."""
    prompts = np.random.default_rng(0).integers(10, VOCABULARY, (4, 50)).tolist()
    rows = []
    for number, (prompt, answer) in enumerate(zip(prompts, generate(url, prompts), strict=True)):
        item = Completion(**vars(completion(1, prompt, answer)), id=number, ordinal=0)
        rows += merge([item], 1.0, Counter(), lambda _: None)
    return rows


@pytest.mark.long
@pytest.mark.parametrize("family", LOADABLE)
def test_an_exported_model_is_one_model_everywhere(family: str, ranks: Ranks, tmp_path: Path) -> None:
    need("sglang and transformers", find_spec("sglang") is not None and find_spec("transformers") is not None)
    exported = trained(family, ranks, tmp_path)
    server = Sglang(EngineConfig(model=str(exported), dtype="float32"), tmp_path / "engine.log")
    try:
        server.wait_healthy()
        rows = sampled(server.url)
    finally:
        server.stop()
    figures = difference(Policy(exported, make_config(tmp_path), ranks), rows, 4096)
    assert figures["logprob_tokens_compared"] >= 4 * 160
    assert figures["max_abs_logprob_diff"] <= TOLERANCE
    assert transformers_gap(exported, rows) <= TOLERANCE
