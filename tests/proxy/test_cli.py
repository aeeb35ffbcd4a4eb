"""The console script and its processes: ready files, clean ends, errors of one sentence."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from urllib.request import urlopen

import aiohttp
import msgspec
import pytest

from proxy.commands.main import main
from proxy.config import EngineConfig
from proxy.engine import process
from proxy.engine.sglang import CPU_PATH, command, environment
from proxy.pool.completions.store import of_attempt
from proxy.pool.database import open_pool
from proxy.pool.processes.parent import die_with_parent
from proxy.pool.rollouts.attempts import by_key

SCRIPT = "def answer(prompt, ids):\n    return 'ok'\n"


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    file = tmp_path / "proxy.toml"
    file.write_text(f'pool = "pool.db"\n[engine]\nmodel = "{tiny_model}"\n')
    return file


def launch(*arguments: object, ready: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A running command and the address in its ready file."""
    words = [sys.executable, "-m", "proxy", *map(str, arguments), "--ready-file", str(ready)]
    started = subprocess.Popen(words, preexec_fn=die_with_parent)
    wait_until(lambda: ready.exists() or started.poll() is not None)
    return started, msgspec.json.decode(ready.read_bytes())["url"]


def wait_until(happened: Callable[[], bool], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, f"nothing happened in {seconds} s"
        time.sleep(0.05)


async def test_a_killed_proxy_loses_no_acknowledged_call(config: Path, tmp_path: Path) -> None:
    engine, engine_url = launch("engine", config, "--scripted", tmp_path / "script.py:answer", ready=tmp_path / "e")
    proxy, url = launch("serve", config, "--engine", engine_url, ready=tmp_path / "p")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    async with aiohttp.ClientSession() as http:
        for _ in range(3):
            async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200
    proxy.kill()
    proxy.wait()
    engine.terminate()
    assert engine.wait(10) == 0
    pool = open_pool(str(tmp_path / "pool.db"))
    attempt = by_key(pool, "")
    assert attempt is not None and len(of_attempt(pool, attempt.id)) == 3


def test_several_engines_can_be_named(config: Path, tmp_path: Path) -> None:
    urls = [f"http://127.0.0.1:{process.free_port()}" for _ in range(2)]
    named = [word for url in urls for word in ("--engine", url)]
    proxy, url = launch("serve", config, *named, ready=tmp_path / "p")
    try:
        with urlopen(f"{url}/health") as answer:
            health = msgspec.json.decode(answer.read())
    finally:
        proxy.kill()
        proxy.wait()
    assert [replica["url"] for replica in health["replicas"]] == urls and not health["engine"]["ok"]


def test_sigterm_ends_the_gateway_cleanly(config: Path, tmp_path: Path) -> None:
    proxy, _ = launch("serve", config, "--engine", "http://127.0.0.1:9", ready=tmp_path / "p")
    proxy.terminate()
    assert proxy.wait(10) == 0


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("[engine]\nmodel = 'gone'\nurl = 'http://x'\n", "has no tokenizer.json"),
        ("[engine]\n", "missing key `model`"),
        ("[engine]\nmodel = 'm'\nspeed = 3\n", "unknown key `speed`"),
        ("[engine]\nmodel = 'm'\ndevice = 'tpu'\n", "choose from auto, cpu, cuda"),
        ("[engine]\nmodel = 'm'\n", "set engine.url or give --engine URL"),
        ("[engine]\nmodel = 'm'\nurl = []\n", "set engine.url or give --engine URL"),
        (
            "[engine]\nmodel = 'm'\nurl = ['http://a', 'b:30000']\n",
            "'b:30000' is not an http URL; write http://HOST:PORT",
        ),
        ("[engine]\nmodel = 'm'\nurl = ['http://a', 'http://a/']\n", "http://a is named twice"),
        ("[engine\n", "is not valid TOML"),
    ],
)
def test_a_bad_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str], lines: str, sentence: str) -> None:
    file = tmp_path / "proxy.toml"
    file.write_text(lines)
    assert main(["serve", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error


@pytest.mark.parametrize(("missing", "sentence"), [("tokenizer.json", "tokenizer"), ("chat_template", "chat template")])
def test_an_incomplete_model(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], missing: str, sentence: str
) -> None:
    shutil.copytree(tiny_model, tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").unlink(missing_ok=True)
    settings = msgspec.json.decode((tmp_path / "m" / "tokenizer_config.json").read_bytes())
    if missing == "chat_template":
        settings.pop("chat_template", None)
    (tmp_path / "m" / "tokenizer_config.json").write_bytes(msgspec.json.encode(settings))
    (tmp_path / "m" / missing).unlink(missing_ok=True)
    (tmp_path / "proxy.toml").write_text("[engine]\nmodel = 'm'\nurl = 'http://x'\n")
    for verb in ("serve", "engine"):
        assert main([verb, str(tmp_path / "proxy.toml")]) == 2
        assert f"no {sentence}" in capsys.readouterr().err


def test_a_script_that_is_not_there(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["engine", str(config), "--scripted", "nowhere.py:answer"]) == 2
    assert main(["engine", str(config), "--scripted", f"{config}:answer"]) == 2
    assert "write it as FILE.py:NAME" in capsys.readouterr().err


@pytest.mark.long
def test_an_engine_that_cannot_start_quotes_its_log(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config.read_text() + 'extra_args = ["--no-such-flag"]\n'
    config.write_text(text)
    assert main(["engine", str(config)]) == 2
    error = capsys.readouterr().err
    assert "--no-such-flag" in error and str(tmp_path / "engine.log") in error


def test_one_configuration_for_cpu_and_gpu(tiny_model: Path) -> None:
    cpu = EngineConfig(model=str(tiny_model), device="cpu")
    gpu = EngineConfig(model=str(tiny_model), device="cuda")
    assert "torch_native" in command(cpu, 1) and environment(cpu)["PYTHONPATH"].startswith(str(CPU_PATH))
    assert "torch_native" not in command(gpu, 1) and str(CPU_PATH) not in environment(gpu).get("PYTHONPATH", "")
    assert "--incremental-streaming-output" in command(gpu, 1)


def test_the_kernel_stand_in_refuses_to_load_beside_cuda() -> None:
    code = "import torch; torch.cuda.is_available = lambda: True; import sgl_kernel"
    environment = {**os.environ, "PYTHONPATH": str(CPU_PATH)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and "refuses to load beside CUDA" in result.stderr


def test_stopping_takes_the_whole_family(tmp_path: Path) -> None:
    """Starts and stops a tree of sleeping processes the way the server is started and stopped."""
    pids = tmp_path / "pids"
    family = f"sleep 1000 & echo $! > {pids}; sleep 1000"
    started = process.start(["sh", "-c", family], dict(os.environ), tmp_path / "log")
    wait_until(lambda: pids.exists() and bool(pids.read_text()))
    process.stop(started, grace_seconds=0.1)
    wait_until(lambda: not alive(int(pids.read_text())))


def test_files_that_a_process_of_a_group_has_mapped_are_known(tmp_path: Path) -> None:
    map_file = "import mmap, sys, time; f = open(sys.argv[1], 'w+b'); f.truncate(9); m = mmap.mmap(f.fileno(), 9)"
    shared, log = tmp_path / "shared file", tmp_path / "log"
    words = [sys.executable, "-c", f"{map_file}; print('mapped', flush=True); time.sleep(1000)", str(shared)]
    started = process.start(["sh", "-c", '"$@" & wait', "sh", *words], dict(os.environ), log)
    try:
        wait_until(lambda: "mapped" in log.read_text())
        assert process.mapped_files(started.pid, str(tmp_path / "shared")) == {shared}
        assert process.mapped_files(os.getpgid(0), str(tmp_path / "shared")) == set()
    finally:
        process.stop(started)
    assert process.mapped_files(started.pid, str(tmp_path / "shared")) == set()


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"
