"""The benchmarks run and say what they should. Their figures are no matter of tests."""

import math
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from benchmarks.schedules.figures import WORKLOADS, divergence
from benchmarks.schedules.simulation import simulate
from trainer.config.batch import BatchConfig, Schedule

ROOT = Path(__file__).parent.parent
KEYS = {
    "cpu_ms_1k", "cpu_ms_32k", "stream_us_per_event", "relay_us_per_event", "turns_per_s_32k", "added_p99_ms",
    "stall_p99_ms", "first_byte_ms", "bytes_per_call_32k", "new_tokens_per_call_32k", "rss_growth_mb",
    "litellm_cpu_ms_1k",
}  # fmt: skip


@pytest.mark.parametrize("parts", ["conversations,streams", pytest.param("", marks=pytest.mark.long)])
def test_the_benchmark_of_the_gateway_ends_with_one_json_object(parts: str, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gateway.py", "--quick", "--out", str(tmp_path / "figures.json")]
    command += ["--parts", parts] if parts else []
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=240)
    figures = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures == msgspec.json.decode((tmp_path / "figures.json").read_bytes())
    assert figures.keys() >= KEYS
    measured = KEYS - {"litellm_cpu_ms_1k"} if not parts else {"cpu_ms_32k", "stream_us_per_event"}
    assert all(figures[key] > 0 for key in measured - {"rss_growth_mb"})
    assert figures["litellm_cpu_ms_1k"] is not None or "litellm_reason" in figures or parts


@pytest.mark.long
def test_the_benchmark_of_the_pool_ends_with_one_json_object(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/pool.py", "--quick", "--out", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=240)
    figures = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures == msgspec.json.decode((tmp_path / "figures.json").read_bytes())
    measured = ("idle_lease_cpu_ms", "idle_admission_cpu_ms", "rollout_cpu_ms", "lease_cpu_s")
    assert all(figures[key] > 0 for key in measured) and figures["database"] == "sqlite"


@pytest.mark.long
def test_the_benchmark_of_trees_ends_with_one_json_object(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/tree.py", "--quick", "--out", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=280)
    figures = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures == msgspec.json.decode((tmp_path / "figures.json").read_bytes())
    for case in ("12", "100_t16", "100_t256", "group8", "compaction"):
        assert figures[f"speedup_{case}"] > 0 and figures[f"bound_{case}"] > 1
    assert figures["max_rel_grad_diff"] < 1e-5
    assert figures["memory_ratio_100"] > 0.7 * figures["token_ratio_100"] and figures["pack_tokens_per_s"] > 0


@pytest.mark.long
@pytest.mark.parametrize("quick", [True, False])
def test_a_trained_head_drafts_what_a_moving_policy_says_and_a_frozen_one_does_not(quick: bool, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/mtp.py", "--out", str(tmp_path / "figures.json"), *["--quick"] * quick]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=2400)
    figures = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures == msgspec.json.decode((tmp_path / "figures.json").read_bytes()) and figures["policies_equal"]
    assert figures["length_trained"] > 1 and figures["length_frozen"] > 1
    if not quick:
        assert figures["reward_after"] > 10 * figures["reward_before"]
        assert figures["length_frozen"] < 1.5 < 2.4 < min(figures["length_before"], figures["length_trained"])


def test_the_benchmark_of_the_sandboxes_ends_with_one_json_object(docker_daemon: str, tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/sandboxes.py", "--quick", "--out", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=240)
    figures = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures == msgspec.json.decode((tmp_path / "figures.json").read_bytes())
    assert figures["concurrent"] == 4 and figures["cycle_ratio"] > 0 and figures["cycles_per_s"] > 0
    fresh, shared = figures["fresh_steps_ms"], figures["shared_steps_ms"]
    assert (
        fresh["fresh start"] < figures["fresh_verifier_ms"]
        and shared["agent's restart"] < figures["shared_verifier_ms"]
    )


@pytest.mark.long
def test_the_benchmark_of_the_harness_ends_with_one_json_object(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/harness.py", "--quick", "--out", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=280)
    figures = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures == msgspec.json.decode((tmp_path / "figures.json").read_bytes())
    assert all(figures[key] > 0 for key in ("cpu_ms_per_attempt", "attempts_per_s", "rss_mb", "resume_s"))
    assert "rss_growth_mb" in figures and figures["attempts"] == 60


@pytest.mark.long
def test_the_benchmark_of_steps_ends_with_one_json_object(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/trainer.py", "--quick", "--out", str(tmp_path / "figures.json")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=280)
    figures = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures == msgspec.json.decode((tmp_path / "figures.json").read_bytes())
    parts = ["assemble", "pack", "forward_backward", "optimizer", "checkpoint", "export"]
    for way in ("flat", "rows", "tree"):
        assert list(figures["cases"][way]["seconds"]) == parts and figures["cases"][way]["trained_tokens"] == 32
    computed = [figures["cases"][way]["computed_tokens"] for way in ("flat", "rows", "tree")]
    assert computed == sorted(computed, reverse=True) and len(set(computed)) == 3
    keys = ("step_flat_over_tree", "learn_flat_over_tree", "flat_tokens_per_s", "peak_mb", "pack_tokens_per_s")
    assert all(figures[key] > 0 for key in keys) and 0 < figures["packing_share_long"] < 1
    assert figures["memory_flat_over_tree"] > figures["memory_rows_over_tree"] > 1


@pytest.mark.parametrize("schedule", ["synchronous", "overlap", "windowed", "strict", "greedy"])
def test_no_simulated_run_lags_over_the_bound_of_its_schedule(schedule: Schedule) -> None:
    batch = BatchConfig(groups=2, schedule=schedule, max_staleness=2 if schedule == "greedy" else None)
    trace = simulate(WORKLOADS["long_tailed"], batch, steps=6, seed=0)
    assert [len(step) for step in trace.steps] == [2] * 6 and trace.seconds >= 6 * WORKLOADS["long_tailed"].step_seconds
    assert trace.lag <= batch.rule().max_staleness
    assert trace.dropped == {} or schedule == "greedy"


def test_a_shift_is_the_divergence_of_two_histograms() -> None:
    assert divergence({"short": 1}, {"short": 1, "long": 3}) == pytest.approx(math.log(4))
    assert divergence({"short": 2, "long": 6}, {"short": 1, "long": 3}) == 0


@pytest.mark.long
def test_the_benchmark_of_schedules_ends_with_one_json_object(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/schedule.py", "--quick", "--out", str(tmp_path / "figures.json")]
    command += ["--picture", str(tmp_path / "curve.svg")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=280)
    figures = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures == msgspec.json.decode((tmp_path / "figures.json").read_bytes())
    compared = ("windowed_vs_sync", "windowed_vs_greedy_moderate", "shift_windowed", "shift_greedy", "shift_strict")
    assert all(figures[key] > 0 for key in compared)
    assert figures["lag_max"] <= figures["lag_bound"] == 5
    assert ElementTree.parse(tmp_path / "curve.svg").getroot().tag.endswith("svg")
