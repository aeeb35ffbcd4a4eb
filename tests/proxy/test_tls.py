"""nginx before the proxy, with the configuration of docs/security.md."""

import getpass
import re
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from aiohttp import web

from proxy.config import EngineConfig, GatewayConfig, ProxyConfig
from proxy.engine.scripted import Fault, ScriptedEngine
from proxy.http import sandbox_listener
from proxy.pool.database import open_pool
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway
from tests.conftest import need
from tests.proxy.conftest import listening, served, user
from tests.proxy.test_auth import attempts
from tests.proxy.test_cli import wait_until

PAGE = Path(__file__).parent.parent.parent / "docs/security.md"
CHAT: dict[str, Any] = {"messages": [user("hi")]}
ADMIN = "the administrator's key, of which nobody has another copy"
AROUND = """
daemon off; pid {place}/pid; error_log stderr; user {user};
events {{}}
http {{
    access_log off; client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/fastcgi; uwsgi_temp_path {place}/uwsgi; scgi_temp_path {place}/scgi;
{page}
}}
"""


@dataclass
class Behind:
    """A client of an nginx, and what is behind it."""

    http: httpx.AsyncClient
    engine: ScriptedEngine
    key: str
    """The key of an open attempt."""

    async def status(self, path: str, key: str = "", body: Any = None) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return (await self.http.request("POST" if body else "GET", path, json=body, headers=headers)).status_code


def configuration(place: Path, url: str) -> str:
    """The page's configuration, with the addresses and files of this test."""
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.S)
    replaced = {
        "unix:/run/blackforge/model/proxy.sock": f"unix:{place}/model",
        "http://127.0.0.1:8000": url,
        "443 ssl": f"unix:{place}/tls ssl",
        "/etc/ssl/certs/model.example.com.pem": f"{place}/cert",
        "/etc/ssl/private/model.example.com.key": f"{place}/key",
    }
    for old, new in replaced.items():
        assert old in block, old
        block = block.replace(old, new)
    return AROUND.format(place=place, page=block, user=getpass.getuser())


@pytest.fixture
async def behind(tmp_path: Path, tiny_model: Path) -> AsyncIterator[Behind]:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    need("nginx (apt-get install nginx)", program is not None)
    (tmp_path / "admin").write_text(ADMIN)
    (tmp_path / "admin").chmod(0o600)
    config = ProxyConfig(
        engine=EngineConfig(model=str(tiny_model)),
        pool=str(tmp_path / "pool.db"),
        proxy=GatewayConfig(admin_key_file=str(tmp_path / "admin")),
    )
    async with AsyncExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(dir="/tmp")))  # short, for sockets
        engine = ScriptedEngine(lambda prompt, ids: "ok", ChatTemplate(tiny_model))
        gateway = Gateway(config, await listening(engine.app(), stack))
        url = await served(gateway, stack)
        runner = gateway.sandbox_runner(1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.SockSite(runner, sandbox_listener.listen_unix(place / "model")).start()
        (place / "nginx.conf").write_text(configuration(place, url))
        (_, key), *_ = attempts(open_pool(config.pool))
        stack.enter_context(_running(str(program), place))
        trusting = ssl.create_default_context(cafile=f"{place}/cert")
        way = httpx.AsyncHTTPTransport(uds=str(place / "tls"), verify=trusting)
        client = httpx.AsyncClient(transport=way, base_url="https://model.example.com", timeout=30)
        yield Behind(await stack.enter_async_context(client), engine, key)


@contextmanager
def _running(program: str, place: Path) -> Iterator[None]:
    """Run nginx, with a certificate made for it."""
    command = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {place}/key -out {place}/cert -days 1"
    name = "-subj /CN=model.example.com -addext subjectAltName=DNS:model.example.com"
    subprocess.run([*command.split(), *name.split()], check=True, capture_output=True)
    log = place / "log"
    with log.open("w") as errors:
        server = subprocess.Popen([program, "-c", f"{place}/nginx.conf", "-e", "stderr"], stderr=errors)
    try:
        wait_until(lambda: server.poll() is not None or (place / "tls").exists())
        assert server.poll() is None, log.read_text()
        yield
    finally:
        server.terminate()
        server.wait()


async def test_issued_keys_open_model_routes_and_the_admin_key_the_others(behind: Behind) -> None:
    for key, expected in ((behind.key, 200), ("", 401), ("stranger", 401), (ADMIN, 403)):
        assert await behind.status("/v1/chat/completions", key, CHAT) == expected
    for key, expected in ((ADMIN, 200), (behind.key, 401), ("", 401)):
        assert await behind.status("/metrics", key) == expected
    assert [await behind.status(path, ADMIN) for path in ("/health", "/pool")] == [200, 403]


async def test_text_arrives_while_it_is_sampled(behind: Behind) -> None:
    """The engine never ends its answer, so whatever is read was not held back."""
    behind.engine.script = lambda prompt, ids: Fault(text="one two three four five", after=3, hang=True)
    head = {"Authorization": f"Bearer {behind.key}"}
    async with behind.http.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}, headers=head) as answer:
        async for line in answer.aiter_lines():
            if '"content":"one' in line:
                return
    raise AssertionError("the answer ended without text")
