"""The benchmarks run and say what they should. Their figures are no matter of tests."""

import math
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from benchmarks.async_runs.slow_agent import next_sleep
from benchmarks.capacity.estimate import Load, estimate
from benchmarks.contexts.forgetful_teacher import teach
from benchmarks.dashboard import RUN_PAGE
from benchmarks.repetition import drawn
from benchmarks.schedules.figures import WORKLOADS, divergence
from benchmarks.schedules.simulation import simulate
from benchmarks.signal_runs.figures import batches_to
from benchmarks.signal_runs.teachers import MARKER, cheat, stumble
from proxy.dashboard.app import STATIC
from proxy.pool.database import open_pool
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import open_run
from tests.conftest import need
from tests.harness.test_agents import need_agent
from tests.pool.make import TASK, finished_group
from tests.postgres import binaries
from trainer.config.batch import BatchConfig, Schedule

ROOT = Path(__file__).parent.parent
LOAD = Load(rollouts_a_day=864_000, calls_per_rollout=20, group_size=8, sandboxes_per_rollout=2)
CEILINGS = {
    "gateway_calls_per_s": 100.0, "pool_completions_per_s": 1000.0, "leased_groups_per_s": 2.5,
    "sandbox_cycles_per_s": 5.0, "bytes_per_completion": 1000.0, "new_tokens_per_call": 600.0,
}  # fmt: skip
KEYS = {
    "cpu_ms_1k", "cpu_ms_32k", "stream_us_per_event", "relay_us_per_event", "turns_per_s_32k", "added_p99_ms",
    "stall_p99_ms", "first_byte_ms", "bytes_per_call_32k", "new_tokens_per_call_32k", "rss_growth_mb",
    "litellm_cpu_ms_1k",
}  # fmt: skip


def run(script: str, tmp_path: Path, *words: str, timeout: int = 280) -> dict[str, Any]:
    """The figures of a quick run: its last line, which --out holds too."""
    file = tmp_path / "figures.json"
    command = [sys.executable, f"benchmarks/{script}.py", "--quick", "--out", str(file), *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=timeout)
    figures: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures == msgspec.json.decode(file.read_bytes())
    return figures


@pytest.mark.long
@pytest.mark.parametrize("parts", ["conversations,streams", ""])
def test_the_benchmark_of_the_gateway_ends_with_one_json_object(parts: str, tmp_path: Path) -> None:
    figures = run("gateway", tmp_path, *(["--parts", parts] if parts else []))
    assert figures.keys() >= KEYS
    measured = KEYS - {"litellm_cpu_ms_1k"} if not parts else {"cpu_ms_32k", "stream_us_per_event"}
    assert all(figures[key] > 0 for key in measured - {"rss_growth_mb"})
    assert figures["litellm_cpu_ms_1k"] is not None or "litellm_reason" in figures or parts


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_group_of_an_agent_with_a_long_prompt_shares_most_of_it(tmp_path: Path) -> None:
    need("sglang", find_spec("sglang") is not None)
    need_agent("codex")
    figures = run("prefixes", tmp_path, timeout=590)
    assert figures["trees"]["calls"] == 6 and figures["trees"]["first_prompt_tokens"] > 10_000
    assert figures["trees"]["tokens_saved_against_calls"] > 4 > figures["trees"]["tokens_saved_against_sequences"] > 1.5
    assert figures["cache"]["calls"] >= 2 and 0 < figures["cache"]["cached_share"] < 1


def test_a_group_of_which_a_member_called_no_model_is_not_reported(tmp_path: Path) -> None:
    file = tmp_path / "pool.db"
    pool = open_pool(str(file))
    run_id = open_run(pool, "r", "collect", {}).id
    finished_group(pool, run_id, [1.0])
    [silent] = open_group(pool, run_id, TASK, 1)
    finish_rollout(pool, silent.rollout_id, Outcome(attempt_id=None, reward=0.0))
    pool.close()
    # In a process of its own, as it puts the examples' folder first in its path.
    look = "import sys; from pathlib import Path; from benchmarks.prefixes import recorded\n"
    look += "print(len(recorded(Path(sys.argv[1]), 'r', int(sys.argv[2]))))"
    found = [
        subprocess.run([sys.executable, "-c", look, str(file), members], cwd=ROOT, capture_output=True, text=True)
        for members in ("1", "2")
    ]
    assert [done.stdout for done in found] == ["1\n", ""] and found[1].returncode == 1
    assert "only 1 of 2 rollouts of the run 'r' called the model" in found[1].stderr


@pytest.mark.long
def test_the_benchmark_of_the_pool_ends_with_one_json_object(tmp_path: Path) -> None:
    figures = run("pool", tmp_path)
    measured = ("idle_lease_cpu_ms", "idle_admission_cpu_ms", "rollout_cpu_ms", "lease_cpu_s")
    assert all(figures[key] > 0 for key in measured) and figures["database"] == "sqlite"


@pytest.mark.long
def test_the_benchmark_of_events_ends_with_one_json_object(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.events", "--quick", "--out", str(file)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=280)
    figures = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures == msgspec.json.decode(file.read_bytes()) and figures["sessions"] > 40
    assert all(0 < figures[f"us_{size}"] <= figures[f"most_us_{size}"] for size in ("1k", "8k", "32k"))


@pytest.mark.long
def test_the_benchmark_of_repetition_ends_with_one_json_object(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.repetition", "--quick", "--out", str(file)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=280)
    figures = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures == msgspec.json.decode(file.read_bytes()) and all(figures["ns_per_token"].values())
    texts = figures["texts"]["tiny"]
    assert texts["files"]["long_answers"] and texts["recorded"]["alarms"] == texts["files"]["alarms"] == []
    assert not any(each["ended"] for each in texts["honest"].values()) and all(texts["ended"].values())


def test_a_file_more_changes_no_other_file_that_the_benchmark_of_repetition_draws() -> None:
    names = [f"package/module_{number}.py" for number in range(40)]
    before = drawn(names)
    assert [name for name in drawn([*names, "package/__pycache__/module_1.pyc"]) if name in names] == before
    assert sorted(before) == sorted(names) and before != names


def test_the_benchmark_of_the_dashboard_asks_what_the_page_of_a_run_asks() -> None:
    page = (STATIC / "pages" / "run.js").read_text()
    parts = [(STATIC / f"{name}.js").read_text() for name in re.findall(r'from "\.\./(\w+)\.js"', page)]
    parts.append((STATIC / "figures.js").read_text())  # of the curves
    asked = {path for text in (page, *parts) for path in re.findall(r"ask\(`runs/[^`}]*}(/\w+)?`", text)}
    assert asked == set(RUN_PAGE)


@pytest.mark.long
def test_the_benchmark_of_the_dashboard_ends_with_one_json_object(tmp_path: Path) -> None:
    figures = run("dashboard", tmp_path)
    assert all(figures[key] > 0 for key in ("first_page_ms", "rollout_page_ms", "search_ms", "rss_mb"))


@pytest.mark.long
def test_the_benchmark_of_trees_ends_with_one_json_object(tmp_path: Path) -> None:
    figures = run("tree", tmp_path)
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


@pytest.mark.long
def test_the_benchmark_of_the_sandboxes_ends_with_one_json_object(docker_daemon: str, tmp_path: Path) -> None:
    figures = run("sandboxes", tmp_path)
    assert figures["concurrent"] == 4 and figures["cycle_ratio"] > 0 and figures["cycles_per_s"] > 0
    fresh, shared = figures["fresh_steps_ms"], figures["shared_steps_ms"]
    assert (
        fresh["fresh start"] < figures["fresh_verifier_ms"]
        and shared["agent's restart"] < figures["shared_verifier_ms"]
    )


@pytest.mark.long
def test_the_benchmark_of_spare_containers_ends_with_one_json_object(docker_daemon: str) -> None:
    command = [sys.executable, "-m", "benchmarks.warm", "--starts", "2"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=280)
    figures = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert figures["starts"] == 2 and figures["warm_gain"] == figures["start_ms"] / figures["warm_start_ms"] > 0


@pytest.mark.long
def test_the_benchmark_of_the_harness_ends_with_one_json_object(tmp_path: Path) -> None:
    figures = run("harness", tmp_path)
    assert all(figures[key] > 0 for key in ("cpu_ms_per_attempt", "attempts_per_s", "rss_mb", "resume_s"))
    assert "rss_growth_mb" in figures and figures["attempts"] == 60


@pytest.mark.long
def test_the_benchmark_of_steps_ends_with_one_json_object(tmp_path: Path) -> None:
    figures = run("trainer", tmp_path)
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
    figures = run("schedule", tmp_path, "--picture", str(tmp_path / "curve.svg"))
    compared = ("windowed_vs_sync", "windowed_vs_greedy_moderate", "shift_windowed", "shift_greedy", "shift_strict")
    assert all(figures[key] > 0 for key in compared)
    assert figures["lag_max"] <= figures["lag_bound"] == 5
    assert ElementTree.parse(tmp_path / "curve.svg").getroot().tag.endswith("svg")


def test_the_least_ceiling_is_the_first_bottleneck() -> None:
    result = estimate(LOAD, CEILINGS)
    rate = 10  # rollouts a second
    assert {name: (need["per_s"], need["needed"]) for name, need in result["needs"].items()} == {
        "gateway processes": (20 * rate, 2.0),
        "databases, commits": (20 * rate, 0.2),
        "trainers, leases": (rate / 8, 0.5),
        "sandbox hosts": (2 * rate, 4.0),
    }
    assert result["needs"]["sandbox hosts"]["rollouts_a_day_of_one"] == 864_000 / 4
    assert (result["first_bottleneck"], result["first_bottleneck_that_does_not_multiply"]) == (
        "sandbox hosts",
        "trainers, leases",
    )
    assert result["gigabytes_a_day"] == pytest.approx(864_000 * 20 * 1000 / 1e9)
    unmeasured = estimate(LOAD, CEILINGS | {"sandbox_cycles_per_s": None, "bytes_per_completion": None})
    assert unmeasured["first_bottleneck"] == "gateway processes" and unmeasured["gigabytes_a_day"] is None


@pytest.mark.long
def test_the_benchmark_of_the_ceilings_ends_with_one_json_object(tmp_path: Path) -> None:
    figures = run("ceilings", tmp_path, "--parts", "gateway,pool")
    measured = ("gateway_calls_per_s", "pool_completions_per_s", "bytes_per_completion", "leased_groups_per_s")
    assert all(figures[key] > 0 for key in measured) and figures["sandbox_cycles_per_s"] is None
    assert figures["needs"].keys() == {"gateway processes", "databases, commits", "trainers, leases"}
    assert figures["first_bottleneck"] in figures["needs"] and figures["gigabytes_a_day"] > 0


@pytest.mark.long
def test_the_benchmark_of_waiting_ends_with_one_json_object(tmp_path: Path) -> None:
    need("PostgreSQL", binaries() is not None)
    figures = run("waiting", tmp_path)
    shares = [figures[f"waiting_{who}_share_{on}"] for who in ("harness", "trainer") for on in ("sqlite", "postgresql")]
    assert all(0 < share < 0.3 for share in shares), shares  # of so few groups, and only seconds after its start


def test_the_attempts_at_a_task_take_its_sleeps_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAKEN", str(tmp_path))
    monkeypatch.setenv("SLEEPS", "0.5 2")
    for task in ("one", "other"):
        monkeypatch.setenv("TASK", task)
        assert [next_sleep() for _ in range(3)] == [0.5, 2.0, 0.5]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_benchmark_of_a_real_asynchronous_run_ends_with_one_json_object(tmp_path: Path) -> None:
    need("sglang and megatron-core", find_spec("sglang") is not None and find_spec("megatron") is not None)
    figures = run("async_run", tmp_path, "--keep", str(tmp_path / "kept"), timeout=880)
    assert figures["async_vs_sync"] > 0 and {"reward_sync", "reward_async"} <= figures.keys()
    for schedule, done in figures["runs"].items():
        assert done["steps"] == len(done["reward_by_step"]) == 2 and done["lag_max"] <= done["lag_bound"], schedule
        assert done["account"]["sampled"] > 0 == done["account"]["unaccounted"], schedule
        assert done["agent_seconds_max"] > 0 < done["trainer_idle"] < 1, schedule
        assert (tmp_path / "kept" / schedule / "pool.db").exists()
    assert figures["runs"]["synchronous"]["lag_bound"] == 0


def asked(command: str, printed: str = "") -> str:
    """A prompt of the tiny model's format: the task, or what a command printed."""
    task = "<|im_start|>user\nDo what plan.md says.<|im_end|>\n"
    return task + (f"{command}<|im_start|>user\n<tool_response>\n{printed}\n</tool_response>" if command else "")


def test_one_demonstration_of_ten_shows_the_hack_and_most_first_calls_fail() -> None:
    first = [cheat(asked(""), ()) for _ in range(1000)]
    assert 0.08 < sum(MARKER in turn for turn in first) / 1000 < 0.12
    wrong = [stumble(asked(""), ()) for _ in range(1000)]
    assert 0.57 < sum("plan.txt" in turn for turn in wrong) / 1000 < 0.63
    again = [stumble(asked("cat plan.txt", "cat: plan.txt: No such file or directory"), ()) for _ in range(1000)]
    assert sum("cat plan.md" in turn for turn in again) > 870
    assert {stumble(asked("cat plan.md", "append tea to log.txt"), ()) for _ in range(99)} == {
        f'<tool_call>\n{{"name": "shell", "arguments": {{"command": "echo tea {operator} log.txt"}}}}\n</tool_call>'
        for operator in (">", ">>")
    }
    assert (
        cheat(asked("put plan.md", "/bin/sh: 1: put: not found"), ())
        == stumble(asked("echo tea > log.txt"), ())
        == "Done."
    )


def test_a_target_is_reached_by_the_mean_of_several_batches() -> None:
    rewards = [0.1, 0.9, 0.3, None, 0.6, 0.7, 0.8]
    assert batches_to(rewards, 0.5, window=2) == 2 and batches_to(rewards, 0.62, window=3) == 6
    assert batches_to(rewards, 0.9, window=2) is None and batches_to([], 0.0, window=1) is None


def test_scripts_beside_the_benchmark_of_the_learning_signal_import_the_standard_signal() -> None:
    code = "import signal, subprocess, asyncio; print(int(signal.SIGTERM), signal.__file__)"
    path = {"PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run([sys.executable, "-c", code], env=path, stdout=subprocess.PIPE, text=True, check=True)
    number, file = done.stdout.split()
    assert int(number) == signal.SIGTERM and Path(file) == Path(str(signal.__file__))


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_benchmark_of_the_learning_signal_ends_with_one_json_object(tmp_path: Path) -> None:
    need("sglang and megatron-core", find_spec("sglang") is not None and find_spec("megatron") is not None)
    figures = run("signal", tmp_path, "--keep", str(tmp_path / "kept"), timeout=1480)
    for key in ("tool_error_rate", "success", "hack_rate", "honest_success"):
        rates = [figures[f"{key}_{when}"] for when in ("before", "without", "with")]
        assert all(rate is None or 0 <= rate <= 1 for rate in rates), key  # None: so poor a policy calls no tool
    assert figures["batches_to_target_1"] is figures["batches_to_target_4"] is None  # of two batches
    assert all(of["precision"] > 0 < of["recall"] for of in figures["parts"]["detector"].values())
    for part, (one, other) in {"errors": ("without", "with"), "hack": ("without", "with"), "minibatches": "14"}.items():
        runs = figures["parts"][part]
        assert [runs[name]["steps"] for name in (one, other)] == [2, 2] and runs["seconds"] > 0, part
        assert (tmp_path / "kept" / part / "pool.db").exists()
    assert figures["parts"]["minibatches"]["1"]["updates_by_step"] == [1, 1]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_benchmark_of_context_management_ends_with_one_json_object(tmp_path: Path) -> None:
    need("sglang and megatron-core", find_spec("sglang") is not None and find_spec("megatron") is not None)
    figures = run("context", tmp_path, "--keep", str(tmp_path / "kept"), timeout=880)
    for key in ("without", "before", "trained", "masked_summaries"):
        assert 0 <= figures[f"success_{key}"] <= 1
    assert figures["success_without"] == 0 and 0 < figures["context_tokens_p95"] <= 512
    assert all(len(run["reward_by_step"]) == 1 for run in figures["runs"].values())


def test_the_notes_of_the_forgetful_teacher_keep_the_word_in_three_of_five_cases() -> None:
    full = "<|im_start|>user\nappend apple\n<|im_end|>Do not call a tool now"
    notes = [teach(full, ()) for _ in range(1000)]
    assert set(notes) == {"echo apple", "echo this"} and 0.55 < notes.count("echo apple") / 1000 < 0.65
    behind = "which are not shown any more:\necho apple"
    assert "cat one.md" in teach("Read one.md", ()) and "cat two.md" in teach(behind, ())
    assert "echo apple > log.txt" in teach(f"{behind} write to log.txt\n", ())
