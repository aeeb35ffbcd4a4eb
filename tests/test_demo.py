"""`make demo`, shortened: the whole way from teacher rollouts to the summary, with every real part."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import need

ROOT = Path(__file__).parent.parent
KEYS = """eval_before eval_after eval_episodes eval_stderr reward_by_step steps policy_version rollouts completions
trainable_tokens max_abs_logprob_diff logprob_tokens_compared wall_seconds""".split()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_shortened_demo_reaches_its_summary(tmp_path: Path) -> None:
    need("sglang and megatron-core", find_spec("sglang") is not None and find_spec("megatron") is not None)
    command = [sys.executable, "examples/demo/run.py", str(tmp_path / "demo"), "--steps", "5", "--episodes", "128"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert set(KEYS) <= summary.keys()
    assert summary["steps"] == len(summary["reward_by_step"]) == 5
    assert summary["eval_episodes"] == 128 and summary["eval_missing"] == 0 and 0 < summary["eval_before"] < 1
    assert len(set(summary["reward_by_step"])) > 1
    assert summary["logprob_tokens_compared"] >= 1000 and summary["max_abs_logprob_diff"] <= 1e-4
    assert (tmp_path / "demo" / "reward.png").stat().st_size > 1000
