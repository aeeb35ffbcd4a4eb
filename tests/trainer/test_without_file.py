"""`trainer launch` without a file: pool, model and engines come from a running proxy, or from flags."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from proxy.engine.tiny_model import make_tiny_model
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts import runs
from tests.conftest import need
from trainer.commands.main import main, parse
from trainer.config import load_config

KEY = "an admin key of tests"


@contextmanager
def serving(*arguments: object, ready: Path) -> Iterator[str]:
    """A proxy command in a process of its own, and its address."""
    words = [sys.executable, "-m", "proxy", *map(str, arguments), "--ready-file", str(ready)]
    process = subprocess.Popen(words)
    try:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.05)
        yield json.loads(ready.read_text())["url"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model, an engine's script, and the proxy's file."""
    make_tiny_model(tmp_path / "model", 0)
    (tmp_path / "script.py").write_text("def answer(prompt, ids):\n    return 'ok'\n")
    (tmp_path / "proxy.toml").write_text('pool = "pool.db"\n[engine]\nmodel = "model"\n')
    return tmp_path


def version_of(engine: str) -> str:
    with urlopen(f"{engine}/model_info") as answer:
        return str(json.loads(answer.read())["weight_version"])


def test_a_proxy_tells_what_to_train_and_only_its_engines_get_weights(directory: Path) -> None:
    need("megatron-core", importlib.util.find_spec("megatron") is not None)
    scripted = ("engine", directory / "proxy.toml", "--scripted", f"{directory / 'script.py'}:answer")
    with ExitStack() as stack:
        engine, other = (stack.enter_context(serving(*scripted, ready=directory / name)) for name in ("e", "other"))
        serve = ("serve", directory / "proxy.toml", "--engine", engine)
        proxy = stack.enter_context(serving(*serve, ready=directory / "p"))
        pool = open_pool(str(directory / "pool.db"))
        runs.open_run(pool, "train", "train", {})
        pool.close()
        before = version_of(other)
        command = [sys.executable, "-m", "trainer", "launch", "--proxy", f"{proxy}/v1", "--steps", "0"]
        subprocess.run(command, cwd=directory, check=True, timeout=240)
        assert version_of(engine) not in (before, "") and version_of(other) == before
    file = directory / "runs" / "train-policy" / "trainer.toml"
    config = load_config(file)
    assert config.model == str(directory / "model") and config.push.engines == (engine,)
    assert config.output == str(file.parent) and file.stat().st_mode & 0o777 == 0o600


def test_a_proxy_with_an_admin_key_tells_only_its_administrator(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(directory)
    (directory / "key").write_text(KEY)
    with (directory / "proxy.toml").open("a") as file:
        file.write('[proxy]\nadmin_key_file = "key"\n')
    serve = ("serve", directory / "proxy.toml", "--engine", "http://127.0.0.1:9")
    with serving(*serve, ready=directory / "p") as proxy:
        with pytest.raises(UserError, match="to its administrator only; give --admin-key-file FILE"):
            parse(["launch", "--proxy", proxy])
        given = parse(["launch", "--proxy", proxy, "--admin-key-file", "key", "--run", "mine", "--set", "loss.kl=0.1"])
    assert (given.config.run, given.run, given.config.loss.kl) == ("mine", "mine", 0.1)
    assert given.config.push.engines == ("http://127.0.0.1:9",)
    assert given.arguments[:2] == ["launch", str(directory / "runs" / "mine-policy" / "trainer.toml")]


def test_without_a_proxy_engines_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engines = ["http://a:1", "http://b:1"]
    words = ["--pool", "postgresql://h/n", "--model", "m", *(word for url in engines for word in ("--engine", url))]
    config = parse(["launch", *words, "--output", "out"]).config
    assert (config.pool, config.model) == ("postgresql://h/n", str(tmp_path / "m"))
    assert config.push.engines == tuple(engines) and config.output == str(tmp_path / "out")


def test_the_written_file_has_what_the_command_line_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launch", "--pool", "p.db", "--model", "m", "--engine", "http://a:1", "--run", "mine"]
    flags = ["--steps", "7", "--nproc", "2"]
    assert main([*words, *flags, "--set", "optimizer.lr=-1"]) == 2 and not Path("runs").exists()
    sets = (
        "optimizer.lr=2e-4", "loss.kind=ppo", "loss.kl=1", "loss.kl_model=first", "optimizer.eps=1e-15",
        'imitation=[{run="teacher", weight=0.5}]', "push.colocated=true",
    )  # fmt: skip
    given = parse([*words, *flags, *(f"--set={override}" for override in sets)])
    config = load_config(Path(given.arguments[1]))
    assert config == given.config and (config.run, config.pool) == ("mine", str(tmp_path / "p.db"))
    assert (config.steps, config.parallel.processes, config.optimizer.lr) == (7, 2, 2e-4)
    assert config.loss.kl_model == str(tmp_path / "runs" / "mine-policy" / "first")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((), "the pool is unknown, as neither a file nor --proxy is given; name it with --pool"),
        (("--pool", "p.db"), "the model is unknown"),
        (("--pool", "p.db", "--model", "m"), "no engine is named, so nobody would get the new weights"),
        (("--pool", "p.db", "--model", "m", "--engine", "a:1"), "push.engines names a:1, which is not an http URL"),
        (("--proxy", "http://127.0.0.1:9"), "the proxy http://127.0.0.1:9 cannot be asked"),
        (("train.toml", "--proxy", "http://127.0.0.1:9"), "the file train.toml and --proxy both say what to train"),
    ],
)
def test_what_is_missing_is_named(
    words: tuple[str, ...], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 2
    assert sentence in capsys.readouterr().err
