"""The stages of benchmarks/gpu.py, small on a CPU, with no package that a machine without a network would lack."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from benchmarks import gpu_stages
from benchmarks.gpu_stages import run, worker
from benchmarks.gpu_stages.carry import CARRIED

ROOT = Path(__file__).parent.parent
GIVEN = ("torch", "transformers")
"""What is there before anything is carried, with all that it requires."""
HIDE = """
import sys
from importlib.machinery import PathFinder

HIDDEN, find_any = {hidden!r}, PathFinder.find_spec

def find_spec(name, path=None, target=None):
    if path is None and name.split(".")[0] in HIDDEN:
        path = [place for place in sys.path if "_vendor" in place]
    return find_any(name, path, target)

PathFinder.find_spec = find_spec
"""
"""A sitecustomize that hides these modules, but for setuptools' own copies of some, which are there with it."""


def required(names: Iterator[str]) -> set[str]:
    """These distributions and all that they require, without extras."""
    known: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in known:
            continue
        known.add(name)
        try:
            needs = [Requirement(line) for line in metadata.requires(name) or ()]
        except metadata.PackageNotFoundError:  # of other platforms
            continue
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return known


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has only what is given and carried."""
    there = required(iter(GIVEN)) | set(CARRIED)
    hidden = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not {name.lower().replace("_", "-") for name in owners} & (there | {"blackforge"})
    }
    assert {"aiohttp", "sglang", "uvloop"} <= hidden and not {"torch", "megatron", "numpy"} & hidden
    directory = tmp_path_factory.mktemp("bare")
    (directory / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    return {**os.environ, "PYTHONPATH": str(directory), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def figures(stage: str, environment: dict[str, str]) -> dict[str, Any]:
    """Run a stage; its line must be the last one's content."""
    command = [sys.executable, "benchmarks/gpu.py", "--quick", "--stage", stage]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    line, whole = (json.loads(text) for text in done.stdout.splitlines())
    assert done.returncode == 0 and line["ended"] == "whole", (line, done.stderr)
    assert whole["stages"] == {stage: line} and line["seconds"] < line["limit"]
    return line


@pytest.mark.long
def test_tree_attention_agrees_with_the_dense_mask_and_compiles_a_few_times(bare: dict[str, str]) -> None:
    measures = figures("attention", bare)
    differences = measures["difference_of_dense"]
    assert all(difference < 1e-5 for difference in differences["float32"].values())
    assert all(difference < 2e-2 for difference in differences["bfloat16"].values())
    assert measures["compilations"]["trees"] == 50 and 1 <= measures["compilations"]["count"] <= 4
    for tokens, one in measures["tokens"].items():
        assert abs(one["flash_tokens"] * (one["flash_tokens"] + 1) / 2 - one["pairs"]) <= one["flash_tokens"]
        assert one["peak_bytes"] < int(tokens) ** 2 and one["tree_over_flash"] > 0


@pytest.mark.long
def test_the_demos_steps_are_what_they_were(bare: dict[str, str]) -> None:
    """On another processor, sums may be rounded in another order; the weights then part a little in every step."""
    measures = figures("demo_replay", bare)
    exact, half, head = (measures[way] for way in ("float32", "bfloat16", "bfloat16_head_float32"))
    assert exact["steps"] == 20 and max(exact["largest_difference"].values()) < 1e-4
    assert exact["logprob_gap_first_step"] < 1e-4 < half["logprob_gap_first_step"] < 0.1
    assert len(set(exact["loss"])) == 20 and max(map(abs, exact["loss"])) > 1e-2
    for other in (half, head):
        assert 0 < other["largest_difference"]["loss"] < 1e-2


@pytest.mark.long
def test_a_stack_of_layers_is_measured_by_flat_rows_and_tree(bare: dict[str, str]) -> None:
    measures = figures("stack", bare)
    assert list(measures["cases"]) == ["12", "100_t16", "100_t256", "group8", "compaction"]
    for name, case in measures["cases"].items():
        tokens = case["tokens"]
        assert tokens["flat"] > tokens["tree"] and tokens["rows"] >= tokens["tree"], name
        assert (tokens["rows"] == tokens["tree"]) == (name in ("12", "100_t16", "100_t256"))  # these only grow
        assert case["flat_bound"] > case["rows_bound"] >= 1 or name == "group8"
        if "unmeasured" not in case:  # on a busy machine, a small layer takes less than the noise
            assert all(value > 0 for value in case["seconds"].values()) and case["mfu"]["tree"] is None


@pytest.mark.long
def test_long_paths_are_measured(bare: dict[str, str]) -> None:
    measures = figures("long_paths", bare)
    assert measures["path"]["tokens"] == 499 and measures["group8"]["tokens"] == 375 + 8 * 13
    assert all(
        one["activation_bytes_all_layers"] >= one["activation_bytes"] > 0
        for one in (measures["path"], measures["group8"])
    )


@pytest.mark.long
def test_a_whole_step_is_measured_by_parts(bare: dict[str, str]) -> None:
    measures = figures("step", bare)
    parts = ["lease", "assemble", "plan", "update_first", "update", "save", "publish"]
    assert [part for part in measures["seconds_by_part"] if part in parts] == parts
    assert list(measures["update"]["seconds"]) == ["assemble", "pack", "forward_backward", "optimizer"]
    assert measures["trained_tokens"] == 2 * 2 * 2 * 8 and measures["checkpoint_bytes"] > measures["export_bytes"] > 0


@pytest.mark.long
def test_experts_are_measured_both_ways_and_replayed(bare: dict[str, str]) -> None:
    measures = figures("mixture", bare)
    assert measures["replay"]["routing_replayed"] == 1
    apart = measures["replay"]["mean_logprob_difference"]
    assert 0 < apart["replay"] <= apart["own"] < 0.1
    for one in measures["tokens"].values():
        assert max(*one["difference_loop"].values(), *one["difference_grouped"].values()) < 2e-2


@pytest.mark.long
def test_gradients_in_bf16_are_near_those_in_fp32(bare: dict[str, str]) -> None:
    measures = figures("gradients", bare)
    for name in ("bfloat16", "bfloat16_head_float32"):
        for chunks in (1, 8):
            one = measures[f"{name}_{chunks}_chunks"]
            assert 0 < one["difference"] < 0.1 and len(one["worst"]) == 5
    assert measures["bfloat16_head_float32_1_chunks"]["logprob_mean"] < measures["bfloat16_1_chunks"]["logprob_mean"]


@pytest.mark.long
def test_traced_parts_give_the_same_gradient(bare: dict[str, str]) -> None:
    """Where there is no GPU, the graphs of both passes run as torch traced them; nothing is compiled."""
    measures = figures("compiled", bare)
    for part in ("norm", "feed_forward", "head_loss"):
        assert measures[part]["difference"] == {"plain": 0, "compiled": pytest.approx(0, abs=1e-2)}
    assert measures["small_pass"]["ms_plain"] > 0


def test_a_case_whose_layers_cost_nothing_has_no_times(tmp_path: Path) -> None:
    """Two layers took as long as one, so that the time of 36 would be that of two."""
    from benchmarks.gpu_stages import stack
    from benchmarks.gpu_stages.models import DENSE_SMALL, hf_config
    from benchmarks.gpu_stages.scene import make_scene
    from trainer.config.model_shape import read_shape  # loads torch, as the others do

    (tmp_path / "config.json").write_text(json.dumps(hf_config(DENSE_SMALL.with_layers(36))))
    scene, shape = make_scene(True, tmp_path), read_shape(tmp_path)
    one = {name: dict.fromkeys(stack.WAYS, 1.0) for name in ("12", "100_t16", "100_t256", "group8", "compaction")}
    two = {name: {way: 2.0 for way in stack.WAYS} for name in one} | {"12": {"flat": 2.0, "rows": 0.9, "tree": 1.0}}
    cases = stack.report(scene, shape, (1, 2), [one, two])
    assert cases["12"].pop("unmeasured") == "rows, tree: 2 layers took no longer than 1"
    assert list(cases["12"]) == ["flat_bound", "rows_bound", "tokens"]
    assert cases["group8"]["seconds"] == dict.fromkeys(stack.WAYS, 36.0)


def test_all_stages_take_nine_minutes_at_most() -> None:
    assert sum(stage.limit for stage in run.STAGES) == 540


def test_a_stage_that_lacks_a_part_says_so_and_the_next_one_runs(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "benchmarks/gpu.py", "--quick", "--stage", "attention", "--stage", "mixture"]
    command += ["--out", str(tmp_path / "found.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0 and [line.get("stage") for line in lines] == ["attention", "mixture", None]
    assert json.loads((tmp_path / "found.json").read_text()) == lines[2] and {"date", "machine"} <= lines[2].keys()
    assert {(line["ended"], line["lacks"]) for line in lines[:2]} == {("lacks a part", "No module named 'torch'")}


def test_a_stage_whose_parts_lack_something_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halves.py").write_text(
        "def figures(scene):\n"
        "    yield {'first': scene.tried(lambda: {'ms': 1})}\n"
        "    yield {'second': scene.tried(lambda: __import__('no_such_package'))}\n"
    )
    monkeypatch.setattr(gpu_stages, "__path__", [*gpu_stages.__path__, str(tmp_path)])
    assert worker.run("halves", tmp_path / "figures.json", True, tmp_path)
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert (figures["ended"], figures["lacks"]) == ("lacks a part", "No module named 'no_such_package'")
    assert figures["first"] == {"ms": 1} and figures["second"] == {"lacks": figures["lacks"]}


def test_a_stage_that_takes_too_long_is_ended_and_leaves_nothing(tmp_path: Path) -> None:
    line = run.run_stage(run.Stage("mixture", 0), small=False, directory=tmp_path)
    assert line["ended"] == "timed out" and list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_wheels_are_fetched_and_light(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--carry", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    wheels = list(tmp_path.glob("*.whl"))
    assert len(wheels) == len(CARRIED) and sum(wheel.stat().st_size for wheel in wheels) < 60e6
    assert all(any(tag in wheel.name for tag in ("cp312", "abi3", "none-any")) for wheel in wheels)
