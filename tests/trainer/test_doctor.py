"""`trainer doctor`: the estimate of memory against what a policy holds, and the verdicts on machines that differ."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from proxy.pool.machine.facts import Disk
from tests.machines import CPU_TORCH, CUDA_TORCH, GB, LAPTOP, NODE
from tests.trainer.held_ranks import SPLITS, measured
from tests.trainer.make import FAMILIES, make_config, write_model
from tests.trainer.torchrun import run_torch
from trainer.commands.main import main
from trainer.config.model_shape import ModelShape, read_shape
from trainer.doctor.examine import Facts, examine
from trainer.doctor.memory import Held, held, stage_parameters
from trainer.doctor.probe import TrainerProbe
from trainer.megatron.parallel import Ranks
from trainer.policy import Policy

ON_CPU = TrainerProbe(torch=CPU_TORCH, device="cpu", backend="gloo")
ON_GPUS = TrainerProbe(torch=CUDA_TORCH, device="cuda", backend="nccl", attention="FlexAttention")
NO_COMPILER = msgspec.structs.replace(NODE, compiler=False)
TOO_MANY = msgspec.structs.replace(ON_GPUS, too_many="rank 15 of this machine has no GPU")
QWEN3_4B = ModelShape(
    family="qwen3", layers=36, hidden=2560, ffn=9728, heads=32, kv_heads=8, head_dim=128, vocab=151936, context=40960,
    norm_eps=1e-6, tied=True, rope={},
)  # fmt: skip


CASES: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {}),
    ("qwen2", {"parallel": {"precision": "bfloat16"}}),
    ("llama", {"parallel": {"precision": "bfloat16"}, "loss": {"kl": 0.1}}),
    ("mimo", {"mtp": {"drafts": 2}}),
    ("qwen3_moe", {"parallel": {"precision": "bfloat16"}}),
    ("qwen3_moe_mixed", {"loss": {"kl": 0.1}}),
]


@pytest.mark.parametrize(("family", "changes"), CASES, ids=[family for family, _ in CASES])
def test_the_estimate_is_what_a_policy_holds_byte_for_byte(
    family: str, changes: dict[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    assert family in FAMILIES
    model, config = write_model(tmp_path / "model", family), make_config(tmp_path, **changes)
    assert held(read_shape(model), config) == measured(Policy(model, config, ranks))


@pytest.mark.long
def test_the_estimate_is_what_each_of_two_ranks_holds_however_they_divide_the_model(tmp_path: Path) -> None:
    """Byte for byte on the rank that holds most; a distributed optimizer divides at another place by some bytes."""
    run_torch("tests.trainer.held_ranks", str(tmp_path))
    for name, (_, parallel) in SPLITS.items():
        model = tmp_path / name / "model"
        estimate = held(read_shape(model), make_config(tmp_path, parallel={"processes": 2, **parallel}))
        both = msgspec.json.decode((tmp_path / f"{name}.json").read_bytes(), type=list[Held])
        most = max(both, key=lambda rank: rank.total)
        if name.startswith("distributed"):
            assert estimate.optimizer == pytest.approx(most.optimizer, rel=0.01), name
            estimate = replace(estimate, optimizer=most.optimizer)
        assert estimate == most, name


def test_ranks_divide_the_estimate(tmp_path: Path) -> None:
    def rank(**parallel: Any) -> Held:
        return held(QWEN3_4B, make_config(tmp_path, parallel={"precision": "bfloat16", **parallel}))

    whole = rank()
    assert 4.0e9 < whole.weights / 2 < 4.1e9 and whole.total == 9 * whole.weights
    assert 0.499 < rank(processes=2, tensor=2).total / whole.total < 0.501
    assert rank(processes=8, distributed_optimizer=True).optimizer == whole.optimizer / 8
    stages = [stage_parameters(QWEN3_4B, make_config(tmp_path, parallel={"processes": 2, "pipeline": 2}).parallel, at)
              for at in (0, 1)]  # fmt: skip
    embedding = QWEN3_4B.vocab * QWEN3_4B.hidden  # tied: both stages hold it
    assert sum(stage.total for stage in stages) == whole.weights / 2 + embedding


@pytest.mark.parametrize(
    ("facts", "parallel", "reason"),
    [
        (Facts(machine=NODE, probe=ON_GPUS, shape=QWEN3_4B), {"processes": 8, "precision": "bfloat16"}, None),
        (Facts(machine=NODE, probe=ON_GPUS, shape=QWEN3_4B), {"processes": 32, "tensor": 8, "pipeline": 4}, None),
        (Facts(machine=NODE, probe=TOO_MANY, shape=QWEN3_4B), {"processes": 16, "precision": "bfloat16"}, "rank 15"),
        (Facts(machine=LAPTOP, probe=ON_CPU, shape=QWEN3_4B), {}, "1 ranks hold 64.4 GB before any activation"),
        (Facts(machine=LAPTOP, probe=TrainerProbe(error="No module named 'megatron'")), {}, "No module named"),
        (Facts(machine=NO_COMPILER, probe=ON_GPUS), {}, "there is no C++ compiler"),
        (Facts(machine=NODE, probe=ON_GPUS, config_errors=("the pool cannot be reached",)), {}, "cannot be reached"),
    ],
    ids=[
        "fits",
        "fits four nodes",
        "too many ranks",
        "too little memory",
        "nothing installed",
        "no compiler",
        "no pool",
    ],
)
def test_a_configuration_is_refused_for_what_the_machine_lacks(
    facts: Facts, parallel: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    report = examine(facts, make_config(tmp_path, parallel=parallel))
    assert report.status == (reason is not None)
    assert (reason or "") in "".join(report.refused)


def test_what_a_gpu_or_a_disk_cannot_hold_is_refused(tmp_path: Path) -> None:
    facts = Facts(machine=NODE, probe=ON_GPUS, shape=replace(QWEN3_4B, layers=80, hidden=8192, ffn=28672))
    parallel = {"processes": 8, "precision": "bfloat16"}
    assert "and a GPU has 85.0 GB" in "".join(examine(facts, make_config(tmp_path, parallel=parallel)).refused)
    full = msgspec.structs.replace(NODE, disks=(Disk(str(tmp_path / "trainer"), 10 * GB),))
    facts = Facts(machine=full, probe=ON_GPUS, shape=QWEN3_4B)
    assert "has 10.0 GB free" in "".join(examine(facts, make_config(tmp_path, parallel=parallel)).refused)


def test_what_has_no_wheel_is_named_on_a_gpu_alone() -> None:
    parts = {part.part for part in examine(Facts(machine=NODE, probe=ON_GPUS)).missing}
    assert parts == {"Transformer Engine", "MagiAttention"}
    built = msgspec.structs.replace(NODE, packages={**NODE.packages, "transformer-engine": "2.11.0"})
    assert [part.part for part in examine(Facts(machine=built, probe=ON_GPUS)).missing] == ["MagiAttention"]
    assert examine(Facts(machine=LAPTOP, probe=ON_CPU)).missing == ()


def test_ranks_of_several_machines_are_not_asked_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answered(_module: str, _precision: str, _head: str, ranks: str) -> Any:
        return msgspec.to_builtins(TOO_MANY if int(ranks) > 8 else ON_GPUS)

    monkeypatch.setattr("trainer.commands.doctor.ask", answered)
    monkeypatch.setattr("trainer.commands.doctor.read_machine", lambda _: NODE)
    write_model(tmp_path / "model")
    file = tmp_path / "train.toml"
    file.write_text('pool = "pool.db"\nrun = "demo"\nmodel = "model"\noutput = "policy"\nparallel.processes = 20\n')
    assert main(["doctor", str(file), "--json"]) == 0
    uses = {use["purpose"]: use["choice"] for use in json.loads(capsys.readouterr().out)["uses"]}
    assert uses["machines"] == "3 like this one, as 20 ranks take a GPU each; start torchrun on every one"
    assert main(["doctor", str(file), "--nproc", "16"]) == 1  # ranks of this machine


def test_the_command_asks_the_trainer_itself_and_refuses_what_no_machine_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((write_model(tmp_path / "model") / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"hidden_size": 10**12}))
    file = tmp_path / "train.toml"
    file.write_text('pool = "pool.db"\nrun = "demo"\nmodel = "model"\noutput = "policy"\n')
    assert main(["doctor", str(file), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "before any activation" in report["refused"][0]
    uses = {use["purpose"]: use["choice"] for use in report["uses"]}
    assert ("GPUs" in uses["device"]) == torch.cuda.is_available()
    assert "attention" in uses
