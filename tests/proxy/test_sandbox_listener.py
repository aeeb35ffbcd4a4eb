"""The listeners for sandboxes serve model routes to keys of open attempts, whatever the proxy's own address allows."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import aiohttp
import msgspec
import pytest

from proxy.commands.main import main
from proxy.config import EngineConfig, ProxyConfig
from proxy.engine.scripted import ScriptedEngine
from proxy.http import sandbox_listener
from proxy.pool.completions.store import of_attempt
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import Attempt, Ending, close_attempt
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway
from tests.proxy.conftest import listening, served, user
from tests.proxy.test_auth import CALLS, attempts
from tests.proxy.test_cli import launch, wait_until

CHAT = {"messages": [user("hi")]}


@dataclass
class Door:
    """A proxy without an admin key on loopback, and a client on its socket for sandboxes."""

    http: aiohttp.ClientSession
    url: str
    pool: Pool
    attempts: list[tuple[Attempt, str]]

    async def ask(self, path: str, body: Any = CHAT, key: str = "", method: str = "POST") -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        url = aiohttp.client.URL(f"http://model{path}", encoded=True)
        async with self.http.request(method, url, json=body, headers=headers) as answer:
            await answer.read()
            return answer.status


@pytest.fixture
async def door(tmp_path: Path, tiny_model: Path, short: Path) -> AsyncIterator[Door]:
    async with AsyncExitStack() as stack:
        engine = await listening(ScriptedEngine(lambda prompt, ids: "ok", ChatTemplate(tiny_model)).app(), stack)
        config = ProxyConfig(engine=EngineConfig(model=str(tiny_model)), pool=str(tmp_path / "pool.db"))
        gateway = Gateway(config, engine)
        url = await served(gateway, stack)
        runner = gateway.sandbox_runner(1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await aiohttp.web.SockSite(runner, sandbox_listener.listen_unix(short / "s")).start()
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(short / "s"))))
        pool = open_pool(str(tmp_path / "pool.db"))
        yield Door(http, url, pool, list(attempts(pool)))


@pytest.fixture
def short() -> Any:
    """A directory with a short path."""
    with TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory) / "door"


async def test_an_attempts_key_opens_every_model_route(door: Door) -> None:
    (own, key), (other, _) = door.attempts
    for path, body in CALLS.items():
        method = "GET" if body is None else "POST"
        assert await door.ask(path, body, key, method) == await door.ask(f"/r/{key}{path}", body, "", method) == 200
    assert of_attempt(door.pool, own.id) and not of_attempt(door.pool, other.id)


@pytest.mark.parametrize("path", ["/health", "/metrics", "/pool", "/", "/v1/health", "/v1/../health", "/v1/models/"])
async def test_there_is_no_other_route(door: Door, path: str) -> None:
    (_, key), _ = door.attempts
    for method, given in (("GET", key), ("POST", key), ("GET", "")):
        assert await door.ask(path, None, given, method) in ((404, 405) if given else (401,))


@pytest.mark.parametrize("key", ["", "stranger", "EMPTY", "bf-never-issued", "BF-x"])
async def test_a_key_that_was_not_issued_opens_no_session(door: Door, key: str) -> None:
    async with aiohttp.ClientSession() as http, http.post(f"{door.url}/v1/chat/completions", json=CHAT) as answer:
        assert answer.status == 200  # on loopback nobody needs a key, and the session is known from now on
    for path, body in CALLS.items():
        assert await door.ask(path, body, key, "GET" if body is None else "POST") == 401


async def test_a_closed_attempt_and_a_path_with_two_keys_are_refused(door: Door) -> None:
    (own, key), (other, second) = door.attempts
    close_attempt(door.pool, other.id, Ending())
    assert await door.ask("/v1/chat/completions", key=second) == 401
    for path in (f"/r/{key}/r/{second}", f"/r/{key}/../r/{second}", f"/r/{key}/%2e%2e/%72/{second}"):
        assert await door.ask(f"{path}/v1/chat/completions") == 400
    assert await door.ask(f"/r/{key}/v1/chat/completions", key=second) == 400
    assert not of_attempt(door.pool, own.id)
    assert await door.ask(f"/r/{key}/../{second}/v1/chat/completions") == 200  # dots are nothing but a prefix
    assert of_attempt(door.pool, own.id) and not of_attempt(door.pool, other.id)


def test_a_socket_that_a_killed_proxy_left_is_taken_over(tmp_path: Path, tiny_model: Path, short: Path) -> None:
    config, path = tmp_path / "proxy.toml", short / "s"
    config.write_text(
        f'pool = "pool.db"\n[engine]\nmodel = "{tiny_model}"\nurl = "http://127.0.0.1:9"\n'
        f'[proxy]\nsandbox_socket = "{path}"\nsandbox_address = "127.0.0.1:0"\n'
    )
    first, _ = launch("serve", config, ready=tmp_path / "first")
    assert main(["serve", str(config)]) == 2  # in use
    first.kill()
    first.wait()
    assert path.is_socket()
    second, url = launch("serve", config, ready=tmp_path / "second")
    with urlopen(f"{url}/health") as answer:
        addresses = msgspec.json.decode(answer.read())["sandboxes"]
    assert addresses["socket"] == str(path) and addresses["address"].startswith("http://127.0.0.1:")
    with pytest.raises(OSError, match="401"):
        urlopen(f"{addresses['address']}/health")
    second.terminate()
    wait_until(lambda: second.poll() is not None)
    assert second.returncode == 0 and not path.exists()


def test_sockets_that_cannot_be_are_one_sentence(short: Path) -> None:
    with pytest.raises(UserError, match="has 3[0-9]{2} bytes, and a Unix socket's has at most 107; name a shorter one"):
        sandbox_listener.listen_unix(short / ("x" * 300))
    short.mkdir()
    (short / "pool.db").touch()
    with pytest.raises(UserError, match="must hold nothing else; use a directory of its own: .* holds pool.db"):
        sandbox_listener.listen_unix(short / "s")
    with pytest.raises(UserError, match="is a file; remove it"):
        sandbox_listener.listen_unix(short / "pool.db")
    (short / "pool.db").unlink()
    with sandbox_listener.listen_unix(short / "s") as listener:
        listener.listen()
        with pytest.raises(UserError, match="another proxy uses this sandbox socket"):
            sandbox_listener.listen_unix(short / "s")
    with pytest.raises(UserError, match=r"cannot be created \(File exists\)"):
        sandbox_listener.listen_unix(short / "s" / "s")


@pytest.mark.parametrize("address", ["8000", "a:b", ":80", "a:70000"])
def test_an_address_that_is_none_is_one_sentence(address: str) -> None:
    with pytest.raises(UserError, match=f"must be HOST:PORT .*: {address}"):
        sandbox_listener.parse_address(address)


def test_any_user_inside_may_connect(short: Path) -> None:
    with sandbox_listener.listen_unix(short / "s"):
        assert (short / "s").stat().st_mode & 0o777 == 0o666 and short.stat().st_mode & 0o111 == 0o111
