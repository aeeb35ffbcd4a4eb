"""Where the engine runs beside a GPU, and how it is started on one. No GPU is needed: the driver is scripted."""

import ctypes
import sys
from pathlib import Path

import pytest

from proxy.config import EngineConfig
from proxy.engine.sglang import Sglang, command, environment, on_cuda
from proxy.pool.errors import UserError

WITH_CPU_TORCH, WITH_CUDA_TORCH = "make install, torch for CPUs", "make install, torch for CUDA"
HALF_GPU, GPU = "make install after make install-gpu", "make install-gpu"
INSTALLED = {WITH_CPU_TORCH: (), WITH_CUDA_TORCH: ("torch",), HALF_GPU: ("kernels",), GPU: ("torch", "kernels")}
"""What is built for CUDA, by what was installed. PyPI's torch is built for CUDA, a wheel from elsewhere may not be."""


class OneGpu:
    """Answers like the NVIDIA driver's library of a machine with one GPU."""

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetCount(self, count: object) -> int:  # noqa: N802
        count._obj.value = 1  # type: ignore[attr-defined]
        return 0


@pytest.fixture(params=INSTALLED)
def installed(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An environment beside a GPU, in place of ours: of its packages, only what tells the builds apart."""
    for_cuda, packages = INSTALLED[request.param], tmp_path / "packages"
    for package in ("torch/lib", "sglang"):
        (packages / package).mkdir(parents=True)
    if "torch" in for_cuda:
        (packages / "torch" / "lib" / "libtorch_cuda.so").touch()
    if "kernels" in for_cuda:
        (packages / "sglang_kernel-0.4.10.dist-info").mkdir()
        (packages / "sglang_kernel-0.4.10.dist-info" / "METADATA").write_text("Name: sglang-kernel\nVersion: 0.4.10\n")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: OneGpu())
    monkeypatch.setattr(sys, "path", [str(packages), *(path for path in sys.path if "site-packages" not in path)])
    for name in ("torch", "sglang"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return str(request.param)


def test_a_gpu_is_taken_only_by_libraries_that_can_use_it(installed: str) -> None:
    module = command(EngineConfig(model="any"), 1)[2]
    assert module == ("sglang.launch_server" if installed == GPU else "proxy.engine.cpu.launch")
    assert on_cuda("cuda") and not on_cuda("cpu")


def test_an_engine_for_cuda_without_its_libraries_is_one_sentence(installed: str, tmp_path: Path) -> None:
    lacking = "sglang-kernel" if installed == WITH_CUDA_TORCH else "a build of torch for CUDA"
    reason = "no config.json" if installed == GPU else f"needs {lacking}, .* make install-gpu"
    with pytest.raises(UserError, match=reason):
        Sglang(EngineConfig(model="no model", device="cuda"), tmp_path / "engine.log")


def test_the_engine_on_the_cpu_sees_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # make hides the GPUs from its tests
    (tmp_path / "config.json").write_text("{}")
    assert environment(EngineConfig(model=str(tmp_path), device="cpu"))["CUDA_VISIBLE_DEVICES"] == ""
    assert environment(EngineConfig(model="any", device="cuda")).get("CUDA_VISIBLE_DEVICES") != ""


@pytest.mark.parametrize("dtype", ["float32", "float"])
def test_float32_on_cuda_names_kernels_that_take_it(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_FORCE_FUSED_OP_BACKEND", raising=False)
    engine = EngineConfig(model="any", device="cuda", dtype=dtype, extra_args=("--max-total-tokens", "9"))
    words = command(engine, 1)
    assert words.count("--attention-backend") == 1 and words[words.index("--attention-backend") + 1] == "triton"
    assert environment(engine)["SGLANG_FORCE_FUSED_OP_BACKEND"] == "torch"


@pytest.mark.parametrize("own", [("--attention-backend", "torch_native"), ("--attention-backend=torch_native",)])
def test_the_attention_backend_that_was_asked_for_stays(own: tuple[str, ...]) -> None:
    words = command(EngineConfig(model="any", device="cuda", dtype="float32", extra_args=own), 1)
    assert words[-len(own) :] == list(own) and "triton" not in words


def test_other_formats_keep_the_kernels_that_sglang_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_FORCE_FUSED_OP_BACKEND", raising=False)
    engine = EngineConfig(model="any", device="cuda", dtype="bfloat16")
    assert "--attention-backend" not in command(engine, 1)
    assert "SGLANG_FORCE_FUSED_OP_BACKEND" not in environment(engine)


def test_an_engine_on_cuda_finds_ninja_of_the_wheels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled with it when they are first called, also where nobody activated the environment."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    path = environment(EngineConfig(model="any", device="cuda"))["PATH"]
    assert path == f"{Path(sys.executable).parent}:/usr/bin:/bin"
