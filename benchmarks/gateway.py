"""Measure what the gateway costs: one JSON object as the last line of output, and in the file of --out.

The gateway runs as users start it (`proxy serve`, SQLite), in its own process on one core; the engine (precomputed
answers) and the load generator are two other processes. A bare aiohttp relay and litellm's proxy are measured for
comparison. docs/performance.md explains each figure. Left out: PostgreSQL, dialects other than chat completions.
"""

import argparse
import http.client
import os
import platform
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

import msgspec

from benchmarks.answers import chat_answer, make_answers
from benchmarks.engine import EngineScript
from benchmarks.load import LoadJob
from proxy.engine.process import free_port
from proxy.engine.tiny_model import make_tiny_model
from proxy.prompt.template import ChatTemplate

HERE = Path(__file__).parent
STREAMS = 64
STREAMED = 256
"""Tokens in a streamed answer."""
PARTS = ("calls", "conversations", "latency", "streams", "relay", "litellm", "rss")


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    calls: int = 3000
    conversations: int = 8
    turns: int = 50
    slow_turns: int = 6
    at_once: int = STREAMS
    rounds: int = 2
    rss_calls: int = 100_000


QUICK = Sizes(calls=100, conversations=2, turns=12, slow_turns=1, at_once=8, rounds=1, rss_calls=300)


@dataclass(frozen=True)
class Setup:
    """What all parts share: the engine's URL, the model, the folder for files, and the sizes."""

    engine: str
    model: Path
    folder: Path
    sizes: Sizes


def main() -> int:
    """Measure the requested parts and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a minute instead of five; the figures mean little")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument("--rss-calls", type=int, help="calls over which memory is watched")
    parser.add_argument("--litellm", default=shutil.which("litellm"), help="litellm's proxy command, if there is one")
    parser.add_argument("--out", type=Path, help="also write the object here")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs `finally` blocks, which end the child processes
    sizes = QUICK if arguments.quick else Sizes()
    if arguments.rss_calls:
        sizes = Sizes(**{**vars(sizes), "rss_calls": arguments.rss_calls})
    figures = measure(sizes, arguments.parts.split(","), arguments.litellm)
    line = msgspec.json.encode(figures)
    if arguments.out:
        arguments.out.write_bytes(msgspec.json.format(line, indent=2) + b"\n")
    print(line.decode(), flush=True)
    return 0


def measure(sizes: Sizes, parts: list[str], litellm: str | None) -> dict[str, Any]:
    """The figures of these parts by name; null where a part did not run."""
    with tempfile.TemporaryDirectory(prefix="gateway-") as folder:
        setup = _model(Path(folder), sizes)
        with _process([HERE / "engine.py", setup.folder / "answers"], core=0) as (engine, _):
            setup = Setup(engine, setup.model, setup.folder, sizes)
            figures: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv)}
            figures["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
            figures["load_average"] = round(os.getloadavg()[0], 1)  # before measuring: the load of others
            figures |= dict.fromkeys(KEYS)
            for part in parts:
                print(f"{part} ...", file=sys.stderr, flush=True)
                figures |= _litellm(setup, litellm) if part == "litellm" else MEASURES[part](setup)
    return figures


# ---- the parts


def _calls(setup: Setup) -> dict[str, Any]:
    """CPU time of a call with 1k tokens of prompt."""
    calls = setup.sizes.calls
    with _gateway(setup) as job:
        result = _load(job, kind="calls", concurrency=4, calls=calls, warm=calls // 10)
    return {"cpu_ms_1k": result["cpu_ms"]}


def _conversations(setup: Setup) -> dict[str, Any]:
    """CPU time and storage of growing conversations, at their end and on average."""
    sizes = setup.sizes
    with _gateway(setup) as job:
        result = _load(job, kind="conversations", concurrency=sizes.conversations, turns=sizes.turns, measured=10)
    stored = _stored(setup.folder / "pool.db")
    names = {"cpu_ms_32k": "cpu_ms", "cpu_ms_mean_50_turns": "cpu_ms_mean", "turns_per_s_32k": "turns_per_s"}
    return {name: result[key] for name, key in names.items()} | stored


def _latency(setup: Setup) -> dict[str, Any]:
    """Latency of 64 conversations at 32k tokens with an engine that takes a second, and stalls of the event loop."""
    sizes = setup.sizes
    turns = sizes.turns - sizes.slow_turns
    with _gateway(setup) as job:
        kind = {"kind": "conversations", "turns": turns, "slow_turns": sizes.slow_turns}
        with subprocess.Popen(_command(job, concurrency=sizes.at_once, **kind), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            stalls = _probe(job["url"], process)
            result = msgspec.json.decode(process.stdout.read())
    added = result["added_ms"]
    return {"added_p50_ms": median(added), "added_p99_ms": _p99(added), "stall_p99_ms": _p99(stalls)}


def _streams(setup: Setup) -> dict[str, Any]:
    """CPU time per event, and time to the first byte, of concurrent streams."""
    with _gateway(setup) as job:
        result = _load(job, kind="streams", concurrency=setup.sizes.at_once, rounds=setup.sizes.rounds)
    first = result["first_byte_ms"]
    return {"stream_us_per_event": _per_event(result), "first_byte_ms": median(first), "first_byte_p99_ms": _p99(first)}


def _relay(setup: Setup) -> dict[str, Any]:
    """The same of the bare relay."""
    with _process([HERE / "relay.py", setup.engine], core=1) as (url, pid):
        job = {"url": url, "path": "/generate", "pid": pid, "engine": setup.engine}
        body = {"input_ids": list(range(1000)), "stream": True, "return_logprob": True}
        sizes = setup.sizes
        result = _load(job, kind="streams", concurrency=sizes.at_once, rounds=sizes.rounds, body=body)
        whole = {**job, "path": "/v1/chat/completions"}
        calls = _load(whole, kind="calls", concurrency=4, calls=sizes.calls, warm=sizes.calls // 10)
    return {"relay_us_per_event": _per_event(result), "relay_cpu_ms_1k": calls["cpu_ms"]}


def _rss(setup: Setup) -> dict[str, Any]:
    """Memory growth over many calls.

    Keys have 4 calls each, so the gateway already forgets sessions when measuring begins.
    """
    calls = setup.sizes.rss_calls
    with _gateway(setup) as job:
        result = _load(job, kind="calls", concurrency=4, calls=calls, warm=calls // 4, per_key=4)
    return {"rss_growth_mb": result["rss_growth_mb"], "rss_mb": result["rss_mb"], "rss_calls": calls}


def _litellm(setup: Setup, command: str | None) -> dict[str, Any]:
    """CPU time of a call through litellm's proxy, or the reason why it was not measured."""
    if command is None or not Path(command).exists():
        reason = "litellm is not installed; run `pip install litellm[proxy]` in its own venv and pass --litellm PATH"
        return {"litellm_cpu_ms_1k": None, "litellm_reason": reason}
    model = {"model": "openai/tiny", "api_base": f"{setup.engine}/v1", "api_key": "none"}
    config = setup.folder / "litellm.yaml"
    settings = {"dangerously_permit_weak_or_unset_master_key": True}  # any key is served, as the gateway does
    models = [{"model_name": "tiny", "litellm_params": model}]
    config.write_bytes(msgspec.json.encode({"model_list": models, "general_settings": settings}))
    port = free_port()
    words = [command, "--config", str(config), "--port", str(port), "--host", "127.0.0.1", "--num_workers", "1"]
    with open(setup.folder / "litellm.log", "wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        try:
            _pin(process.pid, 1)
            _wait_for(port, "/health/liveliness", process)
            job = {"url": f"http://127.0.0.1:{port}", "path": "/v1/chat/completions", "pid": process.pid}
            calls = max(50, setup.sizes.calls // 10)
            result = _load({**job, "engine": setup.engine}, kind="calls", concurrency=4, calls=calls, warm=calls // 10)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return {"litellm_cpu_ms_1k": result["cpu_ms"]}


MEASURES = {
    "calls": _calls,
    "conversations": _conversations,
    "latency": _latency,
    "streams": _streams,
    "relay": _relay,
    "rss": _rss,
}
KEYS = (
    "cpu_ms_1k", "cpu_ms_32k", "stream_us_per_event", "relay_us_per_event", "turns_per_s_32k", "added_p99_ms",
    "stall_p99_ms", "first_byte_ms", "bytes_per_call_32k", "new_tokens_per_call_32k", "rss_growth_mb",
    "litellm_cpu_ms_1k",
)  # fmt: skip


# ---- processes


def _model(folder: Path, sizes: Sizes) -> Setup:
    """Write the tiny model, and the answers that the engine will give."""
    make_tiny_model(folder / "tiny")
    template = ChatTemplate(folder / "tiny")
    kinds = {"short": (128, False), "stream": (STREAMED, False), "turn": (512, True)}
    answers = {kind: make_answers(template, tokens, calls) for kind, (tokens, calls) in kinds.items()}
    (folder / "answers").write_bytes(msgspec.msgpack.encode(EngineScript(answers, chat_answer(template, 128))))
    return Setup("", folder / "tiny", folder, sizes)


@contextmanager
def _gateway(setup: Setup) -> Iterator[dict[str, Any]]:
    """Run `proxy serve` with an empty pool; yields the fields of a LoadJob."""
    for file in setup.folder.glob("pool.db*"):
        file.unlink()
    config = setup.folder / "serve.toml"
    config.write_text('pool = "pool.db"\n[engine]\nmodel = "tiny"\n')
    words = ["-m", "proxy", "serve", config, "--engine", setup.engine]
    with _process(words, core=1) as (url, pid):
        yield {"url": url, "path": "/v1/chat/completions", "pid": pid, "engine": setup.engine}


@contextmanager
def _process(words: list[Any], core: int) -> Iterator[tuple[str, int]]:
    """Run a Python process on one core that prints `ready: URL`; yields its URL and pid."""
    command = [sys.executable, *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            _pin(process.pid, core)
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("ready: "):
                raise SystemExit(f"{' '.join(command)} did not start; see its error above")
            yield line.split()[1], process.pid
        finally:
            process.terminate()


def _pin(pid: int, core: int) -> None:
    """Keep a process on one of the cores that this process may use."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(pid, {cores[core % len(cores)]})


def _command(job: dict[str, Any], **more: Any) -> list[str]:
    """The command line of a load generator for this job."""
    return [sys.executable, str(HERE / "load.py"), msgspec.json.encode(LoadJob(**job, **more)).decode()]


def _load(job: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Run a job in its own process and return its result."""
    completed = subprocess.run(_command(job, **more), stdout=subprocess.PIPE, check=True)
    return dict(msgspec.json.decode(completed.stdout.splitlines()[-1]))


def _probe(url: str, process: "subprocess.Popen[bytes]") -> list[float]:
    """Milliseconds that GET /v1/models takes, measured every 5 ms until the process ends."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    stalls = []
    while process.poll() is None:
        started = time.perf_counter()
        connection.request("GET", "/v1/models")
        connection.getresponse().read()
        stalls.append((time.perf_counter() - started) * 1e3)
        time.sleep(0.005)
    connection.close()
    return stalls


def _wait_for(port: int, path: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until a server answers with 200 on this path. Raises SystemExit if the process ends first."""
    while process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", path)
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit(f"litellm's proxy ended with status {process.returncode} before it was ready")


# ---- numbers


def _per_event(result: dict[str, Any]) -> float:
    """Microseconds of CPU time per engine event (one per token)."""
    return float(result["cpu_s"] / (result["streams"] * STREAMED) * 1e6)


def _p99(values: list[float]) -> float:
    """The 99th percentile."""
    return quantiles(values, n=100)[98]


def _stored(pool: Path) -> dict[str, Any]:
    """Bytes in the pool's file per call, and new tokens per call."""
    connection = sqlite3.connect(pool)
    connection.execute("pragma wal_checkpoint(truncate)")
    calls, tokens = connection.execute(
        "select count(*), sum(length(prompt_tail) + length(sampled)) / 4 from completions"
    ).fetchone()
    connection.close()
    return {"bytes_per_call_32k": pool.stat().st_size / calls, "new_tokens_per_call_32k": tokens / calls}


if __name__ == "__main__":
    sys.exit(main())
