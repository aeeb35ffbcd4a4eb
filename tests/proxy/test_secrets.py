"""Keys and passwords appear neither in the log, nor in the pool's file, nor in the pool's commands, nor in `ps`."""

import asyncio
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from proxy.commands.main import main
from proxy.http.redact import RedactingFormatter, redacted
from proxy.pool.database import open_pool
from proxy.pool.processes.parent import die_with_parent
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from tests.conftest import need
from tests.proxy.conftest import Serve, listening, user
from tests.proxy.test_cli import SCRIPT, wait_until

ADMIN = "an-admin-key-for-the-secrets-test"
SESSION = "sk-of-a-developer-0123456789"
HELLO = {"messages": [user("hi")]}


@contextmanager
def running(log: Path, *arguments: object) -> Iterator[tuple[str, int]]:
    """Run a command of `proxy` with its output in a file; yield its address and process id."""
    ready = log.with_suffix(".ready")
    with log.open("wb") as output:
        words = [sys.executable, "-m", "proxy", *map(str, arguments), "--ready-file", str(ready)]
        started = subprocess.Popen(words, stdout=output, stderr=output, preexec_fn=die_with_parent)
        try:
            wait_until(lambda: ready.exists() or started.poll() is not None)
            yield msgspec.json.decode(ready.read_bytes())["url"], started.pid
        finally:
            started.terminate()
            started.wait(30)


async def every_way(url: str, keys: list[str], admin: str, patience: float | None = None) -> set[int]:
    """Send the keys in every place for a key, to routes that serve, refuse, fail and do not exist.

    `patience`: seconds after which the client leaves.
    """
    seen = set()
    limit = aiohttp.ClientTimeout(total=patience)
    async with aiohttp.ClientSession() as http:
        for key in keys:
            headers: list[dict[str, str]] = [
                *({name: key} for name in ("x-api-key", "x-goog-api-key", "api-key")),
                *({"Authorization": f"{scheme}{key}"} for scheme in ("Bearer ", "Basic ", "")),
            ]
            places = [f"/r/{key}/v1/chat/completions", f"/r/{key}/nothing", f"/v1/messages?key={key}", f"/{key}"]
            for path in ("/v1/chat/completions", "/health", "/v1/models", "/nothing", *places):
                for header in headers:
                    with suppress(TimeoutError):
                        async with http.post(url + path, json=HELLO, headers=header, timeout=limit) as answer:
                            seen.add(answer.status)
            await raw(url, f"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer {key}\0\r\n\r\n")
            await raw(
                url, f"POST /v1/messages HTTP/1.1\r\nx-api-key: {key}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
            )
        async with http.get(f"{url}/health", headers={"Authorization": f"Bearer {admin}"}) as answer:
            assert "engine" in await answer.json()
    return seen


async def raw(url: str, request: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request.encode())
    await reader.readline()
    writer.close()


async def test_keys_are_found_nowhere(tmp_path: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "admin.key").write_text(ADMIN)
    config = tmp_path / "proxy.toml"
    config.write_text(f'[engine]\nmodel = "{tiny_model}"\n[proxy]\nadmin_key_file = "admin.key"\n')
    pool = open_pool(str(tmp_path / "pool.db"))
    opened = open_group(pool, open_run(pool, "r", "train", {}).id, {"id": "t", "domain": "agent"}, 2)
    (attempt, key), (closed, revoked) = (open_attempt(pool, rollout.rollout_id, "command") for rollout in opened)
    close_attempt(pool, closed.id, Ending())
    log = tmp_path / "proxy.log"
    with running(tmp_path / "engine.log", "engine", config, "--scripted", tmp_path / "script.py:answer") as (engine, _):
        with running(log, "serve", config, "--engine", engine) as (url, pid):
            keys = [key, revoked, SESSION, ADMIN, "bf-of-nobody-0123456789"]
            assert await every_way(url, keys, ADMIN) == {200, 401, 403, 404, 405}
            command_line = Path(f"/proc/{pid}/cmdline").read_bytes()
    with running(tmp_path / "broken.log", "serve", config, "--engine", "http://127.0.0.1:9") as (url, _):
        assert 503 in await every_way(url, keys, ADMIN, patience=0.5)  # a run's calls wait for an engine
    capfd.readouterr()
    assert main(["pool", "show", str(tmp_path / "pool.db"), str(attempt.id)]) == 0
    assert main(["pool", "export", str(tmp_path / "pool.db"), "r", "--output", str(tmp_path / "out.jsonl")]) == 0
    shown = "".join(capfd.readouterr())
    assert "completions: " in shown and (tmp_path / "out.jsonl").stat().st_size
    written = [tmp_path / name for name in ("proxy.log", "broken.log", "engine.log", "out.jsonl")]
    for text in (command_line, shown.encode(), *(file.read_bytes() for file in (*written, *tmp_path.glob("pool.db*")))):
        for secret in keys:
            assert secret.encode() not in text


def test_a_password_of_the_pool_is_not_told(
    tmp_path: Path, tiny_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "proxy.toml"
    config.write_text(f'[engine]\nmodel = "{tiny_model}"\nurl = "http://127.0.0.1:9"\n')
    for url in ("postgresql://me:hunter22@127.0.0.1:1/x", "postgresql://me:hunter22@[::1", "mysql://me:hunter22@h/x"):
        assert main(["serve", str(config), "--pool", url]) == 2
        output = "".join(capfd.readouterr())
        assert output.startswith("error: ") and "hunter22" not in output


KEYED = [
    "bug while serving POST /r/SECRET/v1/messages",
    "GET /v1/models?key=SECRET&a=b",
    "<CIMultiDict('Authorization': 'Bearer SECRET', 'x-api-key': 'SECRET')>",
    "<CIMultiDict('api-key': 'SECRET')>",
    "b'x-goog-api-key: SECRET'",
    "(b'Authorization', b'Bearer SECRET')",
    "cannot connect to postgresql://me:SECRET@host/pool",
    "key is bf-SECRET_0123456789",
]


@pytest.mark.parametrize("text", KEYED)
def test_secrets_are_hidden_by_their_form(text: str) -> None:
    assert "SECRET" not in redacted(text) and redacted(text)[:3] == text[:3]


def test_a_traceback_is_logged_without_its_secrets() -> None:
    try:
        raise ValueError("no such key: bf-0123456789abcdef")
    except ValueError:
        record = logging.LogRecord("proxy", logging.ERROR, __file__, 1, "bug at /r/%s/v1", ("abc",), sys.exc_info())
    text = RedactingFormatter("%(levelname)s %(message)s").format(record)
    assert text.startswith("ERROR bug at /r/***/v1\nTraceback") and text.endswith("ValueError: no such key: ***")


def test_what_is_no_secret_stays() -> None:
    text = "the run bf-1 at http://host:80/run/a/b sampled 3 tokens, 50% of the keyboard's bearer tokens"
    assert redacted(text) == text.replace("bearer tokens", "bearer ***")


async def test_a_provider_that_repeats_its_key_is_not_quoted(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    need("litellm (pip install blackforge[providers])", find_spec("litellm") is not None)
    secret = "teachers-key-0123456789"

    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": f"Incorrect API key provided: {secret}"}}, status=401)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", refuse)
    async with AsyncExitStack() as stack:
        monkeypatch.setenv("OPENAI_API_BASE", f"{await listening(app, stack)}/v1")
        monkeypatch.setenv("OPENAI_API_KEY", secret)
        stand = await serve(url="litellm:openai/tiny")
        answer = await stand.chat(user("hi"))
    message = answer["error"]["message"]
    assert answer["status"] >= 400 and "Incorrect API key provided: ***" in message and secret not in message
