"""`proxy doctor`: verdicts on machines that differ, and the command on this one."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest

from proxy.commands.doctor import config_errors
from proxy.commands.main import main
from proxy.config import EngineConfig, ProxyConfig, load_config
from proxy.doctor.examine import Facts, Sandboxes, examine
from proxy.doctor.probe import EngineProbe, import_kernels, in_short
from proxy.doctor.weights import gpus_of, weight_bytes
from proxy.engine.sglang import environment, on_cuda
from proxy.engine.toolkit import cuda_home, installed_wheels, link_toolkit
from proxy.pool.database import demand_reachable
from proxy.pool.errors import UserError
from proxy.pool.machine import facts as machine_facts
from proxy.pool.machine.facts import parse_gpus, read_gpus
from proxy.pool.machine.report import write_report
from proxy.pool.machine.torch_build import TorchBuild
from tests.machines import CPU_TORCH, CUDA_TORCH, GB, LAPTOP, NODE

DOCKER = Sandboxes(kind="docker", promise="containers")
ON_CPU = Facts(
    machine=LAPTOP, probe=EngineProbe(torch=CPU_TORCH), sandboxes=DOCKER, cuda=False, gpu_found=False, toolkit=None
)
ON_GPUS = Facts(
    machine=NODE, probe=EngineProbe(torch=CUDA_TORCH), sandboxes=DOCKER, cuda=True, gpu_found=True,
    toolkit=Path("/usr/local/cuda"), wanted_torch="2.14.1",
)  # fmt: skip
BESIDE_GPUS = msgspec.structs.replace(ON_GPUS, probe=EngineProbe(torch=CPU_TORCH), cuda=False)
"""A machine with GPUs, on which `make install` was run."""
WITHOUT_KERNELS = {name: version for name, version in NODE.packages.items() if name != "sglang-kernel"}
SMI = """\
NVIDIA H100 80GB HBM3, 81559, 81004, 9.0, 580.95.05
NVIDIA GB10, [N/A], [N/A], 12.1, 580.95.05
"""


def with_facts(facts: Facts, **changes: object) -> Facts:
    return msgspec.structs.replace(facts, **changes)


def on(facts: Facts, **machine: object) -> Facts:
    return with_facts(facts, machine=msgspec.structs.replace(facts.machine, **machine))


def named(directory: Path, shape: list[int], dtype: str = "BF16") -> Path:
    """A model directory whose file names one tensor, without its numbers."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    header = json.dumps({"weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}).encode()
    (directory / "model.safetensors").write_bytes(with_size(header))
    return directory


def with_size(header: bytes) -> bytes:
    """A safetensors file with this header and no numbers."""
    return len(header).to_bytes(8, "little") + header


def test_what_nvidia_smi_says_is_read() -> None:
    gpus, driver = parse_gpus(SMI)
    assert [(gpu.name, gpu.memory_bytes >> 20, gpu.capability) for gpu in gpus] == [
        ("NVIDIA H100 80GB HBM3", 81559, "9.0"),
        ("NVIDIA GB10", 0, "12.1"),
    ]
    assert driver == "580.95.05" and parse_gpus("") == ((), "")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'NVIDIA-SMI has failed.'; exit 9", "nvidia-smi ended with status 9: NVIDIA-SMI has failed."),
        ("exit 9", "nvidia-smi ended with status 9: no output"),
        ("exec sleep 60", "nvidia-smi gave no answer within 0.5 s"),
        ("echo Unable to determine the device handle", "its answer has the line 'Unable to determine the device"),
    ],
)
def test_a_failing_nvidia_smi_is_not_a_machine_without_gpus(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(machine_facts, "SMI_SECONDS", 0.5 if "sleep" in script else 60)
    gpus, driver, error = read_gpus()
    assert (gpus, driver) == ((), "") and reason in error
    report = examine(on(ON_CPU, gpu_error=error))
    assert f"not known ({error})" in write_report(report, as_json=False)
    assert "an answer of nvidia-smi" in {part.part for part in report.missing}


def test_a_machine_without_nvidia_smi_has_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_gpus() == ((), "", "")


def test_the_bytes_of_weights_are_those_of_the_files(tiny_model: Path, tmp_path: Path) -> None:
    (file,) = tiny_model.glob("*.safetensors")
    header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
    assert weight_bytes(tiny_model, "auto") == file.stat().st_size - header
    assert weight_bytes(named(tmp_path / "half", [1000, 10]), "float32") == 40_000
    sizes = {"U8": 1, "F8_E4M3": 1, "U16": 2, "U32": 4, "U64": 8, "C64": 8}
    for dtype, size in sizes.items():
        assert weight_bytes(named(tmp_path / dtype, [10], dtype), "bfloat16") == 10 * size


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1\n",
        b"\xff" * 200,
        with_size(b'{"weight": {"dtype": "BF16", "shape": [1]}}')[:-9],
        with_size(b"[]"),
        with_size(b'{"weight": 1}'),
        with_size(b'{"weight": {"dtype": "BF16", "shape": ["a"]}}'),
        with_size(b'{"weight": {"dtype": "BF16", "shape": [-1]}}'),
    ],
    ids=["empty", "git LFS", "no header", "cut off", "a list", "no tensor", "no shape", "negative"],
)
def test_weights_that_cannot_be_read_are_one_sentence(content: bytes, tmp_path: Path) -> None:
    model = named(tmp_path / "model", [10])
    (model / "model.safetensors").write_bytes(content)
    [refusal] = examine(ON_CPU, ProxyConfig(engine=EngineConfig(model=str(model)))).refused
    assert refusal.startswith(f"the weights {model / 'model.safetensors'} cannot be read as safetensors (")


@pytest.mark.parametrize(
    ("words", "gpus", "shared"),
    [
        ("", 1, 1),
        ("--tp-size 4 --max-total-tokens 10", 4, 4),
        ("--tensor-parallel-size=4 --dp-size 2", 8, 4),
        ("--tp 8 --dp-size 8 --enable-dp-attention", 8, 8),
        ("--tp-size 4 --pp-size 2", 8, 8),
    ],
)
def test_the_gpus_of_an_engine_are_those_of_its_arguments(words: str, gpus: int, shared: int) -> None:
    assert gpus_of(words.split()) == (gpus, shared)


@pytest.mark.parametrize(
    ("facts", "parts"),
    [
        (on(ON_CPU, packages={**LAPTOP.packages, "psycopg": "3.3.9"}), set()),
        (ON_GPUS, set()),
        (with_facts(ON_GPUS, probe=EngineProbe(torch=CPU_TORCH)), {"torch for CUDA"}),
        (with_facts(ON_GPUS, wanted_torch="2.15.0"), {"torch 2.15.0"}),
        (on(ON_GPUS, driver_cuda="12.8"), {"a newer driver"}),
        (with_facts(ON_GPUS, toolkit=None), {"nvcc"}),
        (with_facts(ON_GPUS, cuda=False), set()),
        (with_facts(ON_GPUS, cuda=False, gpu_found=False), {"CUDA"}),
        (
            on(with_facts(BESIDE_GPUS, toolkit=None), packages=WITHOUT_KERNELS),
            {"torch for CUDA", "sglang-kernel", "nvcc"},
        ),
        (on(ON_GPUS, compiler=False), {"a C++ compiler and Python's headers"}),
        (with_facts(ON_GPUS, probe=EngineProbe(torch=CUDA_TORCH, broken={"sgl_kernel": "no"})), {"sgl_kernel"}),
        (with_facts(ON_CPU, sandboxes=Sandboxes(kind="process", passed_over="no daemon")), {"Docker", "psycopg"}),
    ],
    ids=[
        "laptop",
        "node",
        "CPU torch",
        "other torch",
        "old driver",
        "no nvcc",
        "device = cpu",
        "no driver",
        "CPU install",
        "no compiler",
        "kernels",
        "no Docker",
    ],
)
def test_what_is_missing_is_named_with_the_command_that_brings_it(facts: Facts, parts: set[str]) -> None:
    missing = examine(facts).missing
    assert {part.part for part in missing} == parts
    assert all(part.lost and part.command for part in missing)


def test_kernels_that_cannot_be_imported_tell_the_reason_that_comes_last() -> None:
    """As sgl_kernel 0.4.10 does, after a list of the places where it looked."""
    last = "ImportError: libcublas.so.13: cannot open shared object file: No such file or directory"
    places = "Attempted locations: common_ops.*\n" * 20
    reason = in_short(f"ImportError:\n[sgl_kernel] CRITICAL: Could not load any library!\n{places}- {last}\n")
    assert reason.startswith("ImportError: [sgl_kernel] CRITICAL") and reason.endswith(last) and len(reason) < 420


def test_kernels_are_imported_beside_the_toolkit_that_the_engine_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch(mode=0o755)
    (tmp_path / "as_deep_gemm.py").write_text("import os\nassert os.environ['CUDA_HOME']\n__version__ = '0.2.3'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", "")  # so that what the probe sets is taken back
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    kernels, broken = import_kernels(["as_deep_gemm", "absent_kernels"])
    assert kernels == {"as_deep_gemm": "0.2.3"} and list(broken) == ["absent_kernels"]


def test_a_model_runs_where_its_weights_fit(tmp_path: Path) -> None:
    big = str(named(tmp_path / "70b", [70, 10**9]))  # 140 GB in bf16

    def refused(facts: Facts, **engine: object) -> str:
        return "".join(examine(facts, ProxyConfig(engine=EngineConfig(model=big, **engine))).refused)  # type: ignore[arg-type]

    assert "take 140.0 GB, and this machine has 16.0 GB" in refused(ON_CPU)
    assert "take 140.0 GB on each of 1 GPUs, and one has 85.0 GB" in refused(ON_GPUS)
    assert refused(ON_GPUS, extra_args=("--tp-size", "2")) == ""
    assert "wants 16 GPUs, and torch sees 8" in refused(ON_GPUS, extra_args=("--tp-size", "16"))
    assert "torch sees no GPU" in refused(with_facts(ON_CPU, cuda=True), device="cuda")
    assert refused(ON_CPU, url="http://10.0.0.7:30000") == ""  # an engine elsewhere
    assert "pool" in refused(with_facts(ON_GPUS, config_errors=("no pool",)), extra_args=("--tp-size", "2"))


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (ON_CPU, ""),
        (ON_GPUS, ""),
        (on(ON_GPUS, packages=WITHOUT_KERNELS), "without sglang-kernel"),
        (with_facts(ON_GPUS, probe=EngineProbe(torch=CUDA_TORCH, broken={"sgl_kernel": "no sm_90"})), "no sm_90"),
        (with_facts(ON_GPUS, probe=EngineProbe(torch=CUDA_TORCH, broken={"deep_gemm": "no"})), ""),
        (with_facts(ON_GPUS, toolkit=None), "no nvcc"),
        (on(ON_GPUS, compiler=False), "no C++ compiler"),
        (with_facts(ON_GPUS, probe=EngineProbe(error="no answer within 300 s")), "no answer within 300 s"),
        (with_facts(ON_CPU, probe=EngineProbe(torch=TorchBuild(error="no libgomp"))), "no libgomp"),
        (on(with_facts(ON_CPU, toolkit=None), compiler=False), ""),
    ],
    ids=["laptop", "node", "no kernels", "broken kernels", "other kernels", "no nvcc", "no compiler", "no answer",
         "no torch", "nothing to compile"],
)  # fmt: skip
def test_an_engine_is_refused_where_a_part_is_missing_without_which_it_does_not_start(
    facts: Facts, reason: str, tmp_path: Path
) -> None:
    model = str(named(tmp_path / "model", [10]))
    report = examine(facts, ProxyConfig(engine=EngineConfig(model=model)))
    assert report.status == bool(reason) and len(report.refused) == bool(reason)
    assert reason in "".join(report.refused)
    elsewhere = ProxyConfig(engine=EngineConfig(model=model, url="http://10.0.0.7:30000"))
    assert examine(facts, elsewhere).status == 0


@pytest.mark.parametrize(
    ("settings", "key", "reason"),
    [
        ('host = "0.0.0.0"', "", "the proxy has no admin key, so it listens on loopback only"),
        ('host = "0.0.0.0"\nadmin_key_file = "key"', "short", "has 5 characters, and it needs at least 16"),
        ('admin_key_file = "absent"', "", "the admin key cannot be read"),
        ('host = "0.0.0.0"\nadmin_key_file = "key"', "0123456789abcdef", ""),
    ],
    ids=["no key", "a short key", "no file", "a key"],
)
def test_a_proxy_that_would_not_begin_is_refused(
    settings: str, key: str, reason: str, tiny_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text(key)
    (tmp_path / "serve.toml").write_text(f'[engine]\nmodel = "{tiny_model}"\n[proxy]\n{settings}\n')
    errors = config_errors(load_config(tmp_path / "serve.toml"))
    assert len(errors) == bool(reason) and reason in "".join(errors)


def test_a_model_that_cannot_be_read_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (model / "tokenizer.json").write_text("{")
    (tmp_path / "serve.toml").write_text('[engine]\nmodel = "model"\n')
    [error] = config_errors(load_config(tmp_path / "serve.toml"))
    assert error.startswith(f"{model / 'tokenizer.json'} is no tokenizer (")


def test_a_model_of_unknown_context_length_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    del config["max_position_embeddings"]
    (model / "config.json").write_text(json.dumps(config))
    (tmp_path / "serve.toml").write_text('[engine]\nmodel = "model"\n')
    [error] = config_errors(load_config(tmp_path / "serve.toml"))
    assert error.startswith("the context length is unknown") and error.endswith("set engine.context_length")


def test_the_wheels_of_cuda_become_a_toolkit_that_sglang_can_link_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, linked = tmp_path / "nvidia" / "cu13", tmp_path / "cuda"
    for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib/libcudart.so.13"):
        (wheels / name).parent.mkdir(parents=True, exist_ok=True)
        (wheels / name).write_text(name)
    (wheels / "bin" / "nvcc").chmod(0o755)
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_wheels() == wheels
    link_toolkit(wheels, linked)
    link_toolkit(wheels, linked)  # again, as after an update
    assert (linked / "lib64" / "libcudart.so").read_text() == "lib/libcudart.so.13"
    assert (linked / "bin" / "nvcc").exists() and (linked / "nvvm" / "bin" / "cicc").exists()
    assert cuda_home({"PATH": str(wheels / "bin")}, linked) == wheels
    assert cuda_home({"CUDA_HOME": "/opt/cuda", "PATH": ""}, linked) == Path("/opt/cuda")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(wheels / "bin"))
    assert environment(EngineConfig(model="any", device="cuda"))["CUDA_HOME"] == str(wheels)
    assert "CUDA_HOME" not in environment(EngineConfig(model=str(named(tmp_path / "model", [1])), device="cpu"))
    assert cuda_home({"PATH": ""}, linked) in (linked, Path("/usr/local/cuda"))


def test_a_pool_that_nobody_serves_is_refused(tmp_path: Path) -> None:
    demand_reachable(str(tmp_path / "new" / "pool.db"))
    assert not (tmp_path / "new").exists()
    with pytest.raises(UserError, match=r"postgresql://me:\*\*\*@127.0.0.1:1/pool"):
        demand_reachable("postgresql://me:secret@127.0.0.1:1/pool?connect_timeout=5")


def test_the_command_asks_the_code_that_decides_and_refuses_what_no_machine_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named(tmp_path / "huge", [10**9, 10**9])
    (tmp_path / "serve.toml").write_text('[engine]\nmodel = "huge"\n')
    assert main(["doctor", str(tmp_path / "serve.toml"), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    uses = {use["purpose"]: use["choice"] for use in report["uses"]}
    assert "huge" in report["refused"][0] or "GPU" in report["refused"][0]
    assert on_cuda("auto") == ("on CUDA" in uses["engine"])
    assert uses["sandboxes"].split(",")[0] in ("docker", "bubblewrap", "process")
    assert report["machine"]["memory_bytes"] > GB
