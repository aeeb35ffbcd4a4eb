"""Starts, health-checks and stops a real SGLang server, with or without a GPU, from one configuration.

This file decides whether the engine runs on a GPU. Left out: several replicas, tensor parallelism beyond
what `extra_args` passes through.
"""

import ctypes
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from importlib import metadata
from pathlib import Path

from proxy.config import EngineConfig
from proxy.engine import process
from proxy.engine.moe_config import LAYERED, layered_cache, read_mixture
from proxy.engine.toolkit import cuda_home
from proxy.pool.errors import UserError

CPU_PATH = Path(__file__).parent / "cpu" / "path"
ROOT = Path(__file__).parents[2]
"""The folder of the package `proxy`, for an engine that is started from any directory."""
START_SECONDS = 1800
"""Time until the engine must be healthy. A server that fails ends by itself, so this only ends one that hangs; loading
a model of hundreds of gigabytes from a network disk takes many minutes."""
CPU_THREADS = "1"
"""OMP threads per engine process on the CPU, where engines are tiny and several share a machine."""
CPU_TOTAL_TOKENS = 65_536
"""Tokens of the KV cache on the CPU, where SGLang would size it by the memory of a GPU."""
ATTENTION = "--attention-backend"
FLOAT32 = ("float32", "float")
"""SGLang's names for it. Some of its default kernels on CUDA have no float32: FlashAttention 3, FlashInfer's attention,
RMSNorm of sglang-kernel 0.4.10."""
SPECULATION = "--speculative-algorithm"
SHARED_FILES = "/dev/shm/sglang_loads_"
"""How the files begin through which SGLang's processes tell their load. SGLang 0.5.23 never deletes them."""

SHARDS = re.compile(r"oading[\w -]* shards: +\d+% Completed \| (\d+)/(\d+) \[[\d:]+<([\d:?]+)")
"""The bar in the log of SGLang 0.5.23 while it loads weights: files loaded, all files, time left (?: not known)."""
LOG_BYTES = 1 << 14
"""The end of the log in which its newest bar is looked for."""


def on_cuda(device: str) -> bool:
    """Whether the engine runs on a GPU. auto: where the driver finds one and the installed libraries can use it."""
    return device == "cuda" or (device == "auto" and finds_gpu() and not lacks_for_cuda())


def finds_gpu() -> bool:
    """Whether NVIDIA's driver finds a GPU. Torch is not asked, because importing it would take seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def lacks_for_cuda() -> str:
    """What SGLang needs on CUDA and this environment lacks; empty: nothing. Imports no torch.

    Looks for torch's library, as a version need not name the build. The kernels are asked for too: `make install`
    brings none, but from PyPI it brings a torch for CUDA.
    """
    torch = importlib.util.find_spec("torch")
    folders = torch.submodule_search_locations if torch else None
    if not any(Path(folder, "lib", "libtorch_cuda.so").exists() for folder in folders or ()):
        return "a build of torch for CUDA"
    return "" if any(metadata.distributions(name="sglang-kernel")) else "sglang-kernel"


def command(config: EngineConfig, port: int) -> list[str]:
    """The command line of the server."""
    cuda = on_cuda(config.device)
    module = "sglang.launch_server" if cuda else "proxy.engine.cpu.launch"
    words = [sys.executable, "-m", module, "--host", "127.0.0.1", "--port", str(port)]
    words += ["--model-path", config.model, "--dtype", config.dtype, "--weight-version", "initial"]
    words += ["--incremental-streaming-output", "--skip-server-warmup", "--log-level", "warning"]
    if config.context_length:
        words += ["--context-length", str(config.context_length)]
    if not cuda:
        words += ["--device", "cpu", ATTENTION, "torch_native", "--sampling-backend", "pytorch"]
        words += ["--sleep-on-idle"]  # an idle scheduler would otherwise spin on a whole core
        words += ["--max-total-tokens", str(CPU_TOTAL_TOKENS)]
    elif config.dtype in FLOAT32 and not any(word.startswith(ATTENTION) for word in config.extra_args):
        words += [ATTENTION, "triton"]
    if config.routed_experts:
        words += ["--enable-return-routed-experts"]
    return [*words, *config.extra_args]


def environment(config: EngineConfig) -> dict[str, str]:
    """The environment of the server: ours, without downloads, and with the CPU stand-ins where there is no GPU."""
    values = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not on_cuda(config.device):
        path = [str(CPU_PATH), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        values |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": CPU_THREADS}
        values["CUDA_VISIBLE_DEVICES"] = ""  # beside a GPU that torch sees, SGLang would call CUDA kernels
        if SPECULATION not in config.extra_args:  # whose draft model may be in any file
            values["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(_other_models(Path(config.model)))
        values["PYTHONPATH"] = os.pathsep.join(path)
        return values
    values["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # ninja
    if home := cuda_home(os.environ):
        values["CUDA_HOME"] = str(home)
    if config.dtype in FLOAT32:
        values.setdefault("SGLANG_FORCE_FUSED_OP_BACKEND", "torch")  # norms and the like by torch itself
    return values


def _other_models(model: Path) -> list[str]:
    """SGLang's model files that do not define this model's architecture; SGLang 0.5.23 would import all 250 of them."""
    package = importlib.util.find_spec("sglang")
    folders = package.submodule_search_locations if package else None
    architectures = json.loads((model / "config.json").read_bytes()).get("architectures") or ["?"]
    files = sorted(Path(folders[0], "srt", "models").glob("*.py")) if folders else []
    other = [file.stem for file in files if f"class {architectures[0]}(" not in file.read_text()]
    return other if len(other) < len(files) else []


class Sglang:
    """One server process. It ends with the process that started it, however that ends."""

    def __init__(self, config: EngineConfig, log: Path):
        if importlib.util.find_spec("sglang") is None:
            raise UserError(
                "sglang is not installed in this environment; "
                "install it with: make install (for NVIDIA GPUs: make install-gpu)"
            )
        if config.device == "cuda" and (lacking := lacks_for_cuda()):
            raise UserError(
                f"engine.device = cuda needs {lacking}, which this environment lacks; "
                "install it with: make install-gpu, or set engine.device to cpu"
            )
        if not (Path(config.model) / "config.json").is_file():
            raise UserError(f"the model directory {config.model} has no config.json; name one in Hugging Face format")
        if config.routed_experts:
            read_mixture(Path(config.model))
            if any(word in LAYERED for word in config.extra_args):
                raise UserError(layered_cache("the engine of engine.extra_args"))
        self._port = port = config.port or process.free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._earlier_bytes = log.stat().st_size if log.exists() else 0
        """What servers before this one wrote to the log."""
        self._shared_files: set[Path] = set()
        self._process: subprocess.Popen[bytes] = process.start(command(config, port), environment(config), log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exited(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def wait_healthy(self) -> None:
        """Wait until the server answers its health check; UserError with the end of its log when it does not."""
        deadline = time.monotonic() + START_SECONDS
        while not healthy(self.url):
            if self.exited() is not None:
                raise UserError(self.failed(f"ended with status {self.exited()} while starting{self._port_taken()}"))
            if time.monotonic() > deadline:
                raise UserError(self.failed(f"was not healthy after {START_SECONDS} s"))
            time.sleep(0.2)
        # Taken down now: a server that is killed has no mappings any more.
        self._shared_files = process.mapped_files(self.pid, SHARED_FILES)

    def loaded(self) -> str:
        """How many files of the weights are loaded, and the time that the others need; empty: the log does not say."""
        bars = SHARDS.findall(process.newest_text(self.log, LOG_BYTES, self._earlier_bytes))
        if not bars:
            return ""
        done, files, left = bars[-1]
        return f", {done} of {files} files of weights" + ("" if left == "?" else f", {left} left")

    def failed(self, what: str) -> str:
        """One sentence about a failure, with the end of the log."""
        return f"the engine at {self.url} {what}; see {self.log}, which ends with: {process.end_of(self.log)}"

    def _port_taken(self) -> str:
        """SGLang's log ends with a time-out where it could not bind its port, so the reason is asked for here."""
        if process.is_free(self._port):
            return ""
        return f", as another program took the port {self._port}; end that program, or leave engine.port out"

    def stop(self) -> None:
        """End the server, and remove the files in shared memory that it leaves behind."""
        self._shared_files |= process.mapped_files(self.pid, SHARED_FILES)
        process.stop(self._process)
        for file in self._shared_files:
            file.unlink(missing_ok=True)


def healthy(url: str) -> bool:
    """Whether an engine serves at this address."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
