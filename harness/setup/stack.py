"""Connects a run to a proxy with its engine and pool, or starts them as child processes that die with this one.

Without a model directory, a tiny model with random weights is made in the run directory. Its words are noise, but
everything else is real.
"""

import asyncio
import http.client
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec

from harness.failure import AttemptFailed
from harness.run_dir import RunDir
from proxy.pool.errors import UserError
from proxy.pool.processes.parent import die_with_parent
from proxy.pool.terminal.progress import progress

log = logging.getLogger(__name__)
START_SECONDS = 2000
"""More than proxy/engine/sglang.py gives an engine, which then says itself what was slow. A failed one ends at once."""
STOP_SECONDS = 20
RESTART_SECONDS = 1.0
"""Pause before the run's own engine is started again."""
END_CALLS_SECONDS = 10
"""How long a proxy may take to end the calls of attempts. It only has to tell the engine and write their rows."""
TINY_REPLY_TOKENS = 128
"""A tiny random model seldom ends its turn by itself."""


class _EngineHealth(msgspec.Struct):
    url: str = ""
    ok: bool = False


class _ReplicaHealth(msgspec.Struct):
    url: str
    version: str | None = None


class ProxyHealth(msgspec.Struct, kw_only=True):
    """The fields of the proxy's /health that a run needs."""

    model: str
    engine: _EngineHealth
    pool: str | None = None
    context_length: int
    tool_formats: int = 1
    """In how many ways the model's chat template offers tools."""
    sandboxes: dict[str, str] = {}
    replicas: list[_ReplicaHealth] = []


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """Which proxy a run uses, and how to start one."""

    proxy: str | None = None
    """URL of a running proxy. None: start one."""
    pool: str | None = None
    model: Path | None = None
    admin_key_file: Path | None = None
    """File with the key that a running proxy needs to show its model and pool. A file, as `ps` shows arguments."""
    script: str | None = None
    """FILE.py:NAME of a scripted engine in place of the real one."""
    for_sandboxes: Mapping[str, str] = field(default_factory=dict)
    """Listeners for sandboxes of a proxy that is started (keys of proxy/config.py)."""


@dataclass(frozen=True)
class RunningProxy:
    """A proxy that has answered."""

    url: str
    pool: str
    model: str
    context_length: int
    admin_key: str | None = field(default=None, repr=False)
    tool_formats: int = 1
    sandboxes: Mapping[str, str] = field(default_factory=dict)
    """Its listeners for sandboxes: a `socket` on its machine, an `address` for relays."""

    async def trouble(self) -> AttemptFailed | None:
        """Ask the proxy whether it and its engine work. Returns the failure, or None."""
        try:
            health = await asyncio.to_thread(ask_health, self.url, self.admin_key)
        except OSError as error:
            return AttemptFailed("proxy", f"the proxy {self.url} does not answer ({reason(error)})")
        if not health.engine.ok:
            return AttemptFailed("engine", f"the engine {health.engine.url} of the proxy {self.url} does not answer")
        return None

    async def end_calls(self, attempt_ids: Collection[int]) -> None:
        """Have the proxy end the calls of attempts whose agents have ended, and record what they have sampled.

        Once an attempt is closed, it takes no row. A proxy that does not answer is only reported: the attempts are
        valid without these rows.
        """
        if not attempt_ids:
            return
        headers = {"Authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}
        timeout = aiohttp.ClientTimeout(total=END_CALLS_SECONDS)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, raise_for_status=True) as client,
                client.post(f"{self.url}/end_calls", json=list(attempt_ids), headers=headers),
            ):
                pass
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("%s did not end the calls of %s: %r", self.url, sorted(attempt_ids), error)


def ask_health(url: str, admin_key: str | None = None, timeout: float = 20) -> ProxyHealth:
    """Ask a proxy for its health. OSError when it does not answer, UserError when the answer is not `proxy serve`'s."""
    request = urllib.request.Request(
        f"{url}/health", headers={"Authorization": f"Bearer {admin_key}"} if admin_key else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return msgspec.json.decode(answer.read(), type=ProxyHealth)
    except http.client.HTTPException as error:
        raise ConnectionError(f"no whole HTTP answer: {error!r}") from error
    except msgspec.DecodeError as error:
        raise UserError(
            f"{url}/health is not that of `proxy serve` ({error}); check --proxy, and --admin-key-file where it has one"
        ) from error


def connect(url: str, pool: str | None, admin_key: str | None = None) -> RunningProxy:
    """Connect to the running proxy at a URL. UserError when it does not answer or does not name its pool.

    Its engine may be away: the run waits for it, as it does later.
    """
    url = url.rstrip("/").removesuffix("/v1")
    try:
        health = ask_health(url, admin_key)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the proxy {url} does not answer ({reason(error)}); start `proxy serve` or correct --proxy"
        ) from error
    pool = pool or health.pool
    if pool is None:
        raise UserError(f"the proxy {url} does not name its pool; give its database URL with --pool")
    return RunningProxy(
        url, pool, health.model, health.context_length, admin_key, health.tool_formats, health.sandboxes
    )


def check_tool_formats(proxy: RunningProxy, kinds: Sequence[str]) -> None:
    """Check that the proxy's model has a choice of tool formats where they are to vary (`augment`)."""
    if "tool_format" in kinds and proxy.tool_formats < 2:
        raise UserError(
            f"augment = tool_format varies nothing with the model {proxy.model!r}, whose chat template offers tools in "
            "one way; leave it out (docs/augmentation.md)"
        )


def _admin_key(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"the admin key cannot be read ({error}); name the proxy's with --admin-key-file") from error


@contextmanager
def service(options: ProxyOptions, directory: RunDir) -> Iterator[RunningProxy]:
    """Give the proxy that a run uses. One that was started here is stopped at the end of the block."""
    if options.proxy is not None:
        yield connect(options.proxy, options.pool, _admin_key(options.admin_key_file))
        return
    children: list[subprocess.Popen[bytes]] = []
    stopping = threading.Event()
    keeping = threading.Thread(target=_keep_engine, args=(options, directory, children, stopping))
    try:
        with progress("starting an engine and a proxy"):
            running = _start_all(options, directory, children)
        keeping.start()
        yield running
    finally:
        stopping.set()
        for child in reversed(children):
            _stop(child)
        while keeping.is_alive():  # it may have started the engine again just now
            _stop(children[-1])
            keeping.join(RESTART_SECONDS)


@contextmanager
def replaying(
    config: Path, attempt_id: int, pool: str, directory: Path, *, ignored: Sequence[str], listeners: Mapping[str, str]
) -> Iterator[RunningProxy]:
    """Start a proxy that answers with a recorded attempt's completions; it is stopped at the end of the block.

    `config`: configuration of the proxy that recorded the attempt. The new pool (pool.db) and the differences between
    requests (differences.jsonl) go to `directory`.
    """
    children: list[subprocess.Popen[bytes]] = []
    arguments = ["--pool", pool, "--record", str(directory / "pool.db"), "--port", "0"]
    arguments += [f"--{key.replace('_', '-')}={value}" for key, value in listeners.items()]
    arguments += ["--report", str(directory / "differences.jsonl"), *(f"--ignore={pattern}" for pattern in ignored)]
    try:
        url = _start(["replay", str(config), str(attempt_id), *arguments], directory / "proxy.log", children)
        yield connect(url, str(directory / "pool.db"))
    finally:
        for child in children:
            _stop(child)


def _start_all(options: ProxyOptions, directory: RunDir, children: list[subprocess.Popen[bytes]]) -> RunningProxy:
    """Make the model, then start the engine and the proxy, each when the one before it is ready."""
    model = options.model or directory.path / "model"
    if options.model is None and not (model / "config.json").exists():
        _tiny_model(model, directory.logs / "model.log")
    config = directory.path / "proxy.toml"
    config.touch()
    config.chmod(0o600)  # a database URL may hold a password
    config.write_text(_config(options, directory, model))
    engine = _start_engine(options, directory, children)
    port = f"[engine]\nport = {urlsplit(engine).port}\n"
    config.write_text(config.read_text().replace("[engine]\n", port))  # for an engine that is started again
    proxy = _start(["serve", str(config), "--engine", engine], directory.logs / "proxy.log", children)
    return connect(proxy, options.pool)


def _start_engine(options: ProxyOptions, directory: RunDir, children: list[subprocess.Popen[bytes]]) -> str:
    script = ["--scripted", options.script] if options.script else ["--log", str(directory.logs / "sglang.log")]
    arguments = ["engine", str(directory.path / "proxy.toml"), *script]
    return _start(arguments, directory.logs / "engine.log", children)


def _keep_engine(
    options: ProxyOptions, directory: RunDir, children: list[subprocess.Popen[bytes]], stopping: threading.Event
) -> None:
    """Start the run's engine again whenever it has ended, until the run stops. The first child is the engine."""
    engine = children[0]
    while True:
        engine.wait()
        if stopping.wait(RESTART_SECONDS):
            return
        with suppress(UserError):  # its log says why; the run's patience ends the tries
            _start_engine(options, directory, children)
        engine = children[-1]


def _config(options: ProxyOptions, directory: RunDir, model: Path) -> str:
    pool = options.pool or str(directory.path / "pool.db")
    text = f"pool = {_toml(pool)}\n\n[engine]\nmodel = {_toml(str(model.absolute()))}\n"
    if options.model is None:
        text += 'dtype = "float32"\n'
        if options.script is None:
            text += f"\n[sampling]\nmax_new_tokens = {TINY_REPLY_TOKENS}\n"
    listeners = "".join(f"{key} = {_toml(value)}\n" for key, value in options.for_sandboxes.items())
    return f"{text}\n[proxy]\n{listeners}"


def _toml(text: str) -> str:
    return msgspec.json.encode(text).decode()  # a JSON string is a TOML basic string


def _tiny_model(model: Path, log: Path) -> None:
    with log.open("ab") as output:
        command = [sys.executable, "-m", "proxy", "tiny-model", str(model)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    if done.returncode:
        raise UserError(f"no model was named, and the tiny one could not be made ({_end(log)}); give --model DIR")


def _start(arguments: list[str], log: Path, children: list[subprocess.Popen[bytes]]) -> str:
    """Start a proxy command and return its URL once it is ready. UserError with the end of its log when it fails."""
    ready = log.with_suffix(".ready")
    ready.unlink(missing_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "proxy", *arguments, "--ready-file", str(ready)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that Ctrl-C reaches the harness alone, which stops its children in order
            preexec_fn=partial(die_with_parent, signal.SIGTERM),
        )
    children.append(child)
    deadline = time.monotonic() + START_SECONDS
    while not ready.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            state = "still starting" if child.returncode is None else f"ended with {child.returncode}"
            raise UserError(f"`proxy {arguments[0]}` did not start ({state}: {_end(log)}); see {log}")
        time.sleep(0.05)
    return str(msgspec.json.decode(ready.read_bytes())["url"])


def _stop(child: subprocess.Popen[bytes]) -> None:
    """Ask a child to end, and kill its process group after STOP_SECONDS."""
    child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _end(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("error: ")[-500:] if lines else "its log is empty"


def reason(error: Exception) -> str:
    """Return what an error of a request says, without the name of the library."""
    return str(error.reason if isinstance(error, urllib.error.URLError) else error)
