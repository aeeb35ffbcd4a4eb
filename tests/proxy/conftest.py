"""Fixtures of the proxy's tests: a tiny model, and a real gateway in front of a scripted engine, both on real ports.

Not covered: a GPU engine, listeners other than loopback on a real network.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from proxy.config import EngineConfig, GatewayConfig, ProxyConfig, SamplingConfig
from proxy.engine.scripted import Script, ScriptedEngine
from proxy.engine.sglang import Sglang
from proxy.engine.tiny_model import make_tiny_model
from proxy.http.limits import RequestLimits
from proxy.pool.completions.records import Completion
from proxy.pool.completions.store import of_attempt, paths
from proxy.pool.database import Pool, open_pool
from proxy.pool.rollouts.attempts import by_key
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway
from tests.conftest import need

SHELL = {
    "type": "function",
    "function": {
        "name": "shell",
        "description": "run a command",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a random Qwen3 with tokenizer and template."""
    need("torch", find_spec("torch") is not None)
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(directory, seed=0)
    return directory


@pytest.fixture(scope="session")
def template(tiny_model: Path) -> ChatTemplate:
    return ChatTemplate(tiny_model)


@pytest.fixture(scope="session")
def sglang_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sglang]:
    """A real SGLang server with the tiny model, shared by the session."""
    need("sglang", find_spec("sglang") is not None)
    config = EngineConfig(model=str(tiny_model), dtype="float32")
    engine = Sglang(config, tmp_path_factory.mktemp("sglang") / "engine.log")
    try:
        engine.wait_healthy()
        yield engine
    finally:
        engine.stop()


@dataclass
class Stand:
    """A gateway, its pool, and a client that uses the key `agent`."""

    url: str
    pool: Pool
    http: aiohttp.ClientSession
    engine: ScriptedEngine | None = None
    replicas: tuple[ScriptedEngine, ...] = ()
    """All scripted engines, the first of which is `engine`."""

    async def chat(self, *messages: dict[str, Any], key: str = "agent", **fields: Any) -> dict[str, Any]:
        """One chat completion that is not streamed; `status` is added to the answer."""
        body = {"model": "tiny", "messages": messages, **fields}
        async with self.post(body, key) as answer:
            return {**await answer.json(), "status": answer.status}

    async def stream(self, *messages: dict[str, Any], **fields: Any) -> list[Any]:
        """The events of a streamed chat completion, `[DONE]` as the last one."""
        async with self.post({"model": "tiny", "messages": messages, "stream": True, **fields}) as answer:
            lines = [line[6:] for line in (await answer.read()).splitlines() if line]
        return [line.decode() if line == b"[DONE]" else msgspec.json.decode(line) for line in lines]

    def post(self, body: Any, key: str = "agent") -> Any:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        headers = {"Authorization": f"Bearer {key}"}
        return self.http.post(f"{self.url}/v1/chat/completions", data=data, headers=headers)

    async def ask(self, path: str, body: Any, **headers: str) -> dict[str, Any]:
        """A POST to any dialect that is not streamed; `status` is added to the answer."""
        async with self.send(path, body, **headers) as answer:
            return {**await answer.json(), "status": answer.status}

    async def events(self, path: str, body: Any) -> list[dict[str, Any]]:
        """The events of a streamed answer in any dialect, without comments and `[DONE]`."""
        async with self.send(path, body) as answer:
            lines = (await answer.read()).splitlines()
        return [msgspec.json.decode(line[6:]) for line in lines if line.startswith(b"data: {")]

    def send(self, path: str, body: Any, **headers: str) -> Any:
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        return self.http.post(f"{self.url}{path}", data=data, headers=headers or {"x-api-key": "agent"})

    def recorded(self, key: str = "agent") -> list[Completion]:
        attempt = by_key(self.pool, key)
        return [] if attempt is None else of_attempt(self.pool, attempt.id)

    def path(self, index: int = -1, key: str = "agent") -> list[int]:
        recorded = self.recorded(key)
        return paths(recorded)[recorded[index].id].tolist()


Serve = Callable[..., Awaitable[Stand]]


@pytest.fixture
async def serve(tiny_model: Path, tmp_path: Path) -> AsyncIterator[Serve]:
    """Return a function that starts a gateway with replicas of a scripted engine, or with the engines at `url`."""
    async with AsyncExitStack() as stack:

        async def start(
            script: Script | None = None, url: str | tuple[str, ...] = "", replicas: int = 1, **config: Any
        ) -> Stand:
            count, model = 0 if script is None else replicas, config.pop("model", tiny_model)
            engines = tuple(ScriptedEngine(script, ChatTemplate(model)) for _ in range(count) if script)
            url = tuple([await listening(engine.app(), stack) for engine in engines]) or url
            limits = RequestLimits(**config.get("limits", {}))
            gateway = Gateway(_config(model, tmp_path / "pool.db", config), url, limits=limits)
            http = await stack.enter_async_context(aiohttp.ClientSession())
            pool = open_pool(str(tmp_path / "pool.db"))
            where = await served(gateway, stack)
            return Stand(where, pool, http, engines[0] if engines else None, engines)

        yield start


def _config(model: Path, pool: Path, values: dict[str, Any]) -> ProxyConfig:
    engine = EngineConfig(
        model=str(model),
        context_length=values.get("context_length"),
        silence_seconds=values.get("silence", 60),
        tool_format=values.get("tool_format", "auto"),
        routed_experts=values.get("routed_experts", False),
    )
    sampling = SamplingConfig(max_new_tokens=values.get("max_new_tokens"))
    return ProxyConfig(
        engine=engine,
        pool=str(pool),
        sampling=sampling,
        proxy=GatewayConfig(
            host=values.get("host", "127.0.0.1"),
            admin_key_file=_admin_key_file(pool, values),
            history=values.get("history", "splice"),
            prescribed=values.get("prescribed", GatewayConfig().prescribed),
            max_calls=values.get("max_calls", 4096),
        ),
    )


def _admin_key_file(pool: Path, values: dict[str, Any]) -> str:
    """Write the admin key's file where the test asks for one, or the listening address needs it."""
    key = values.get("admin_key") or ("an admin key of tests" if "host" in values else "")
    if not key:
        return ""
    file = pool.with_name("admin.key")
    file.write_text(f"{key}\n")
    return str(file)


async def served(gateway: Gateway, stack: AsyncExitStack) -> str:
    """Serve a gateway on a free port, as `proxy serve` does, until the stack unwinds."""
    return await _started(gateway.runner(shutdown_seconds=1), stack)


async def listening(app: web.Application, stack: AsyncExitStack, port: int = 0) -> str:
    """Serve an application on a free port, or on this one, until the stack unwinds."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
    return await _started(runner, stack, port)


async def _started(runner: web.AppRunner, stack: AsyncExitStack, port: int = 0) -> str:
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


class Seen:
    """A script that keeps the prompts that it gets."""

    def __init__(self, script: Script):
        self.prompts: list[str] = []
        self._script = script

    def __call__(self, prompt: str, ids: Sequence[int]) -> Any:
        self.prompts.append(prompt)
        return self._script(prompt, ids)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def shell_call(command: str) -> str:
    """A tool call as the model would write it."""
    body = msgspec.json.encode({"name": "shell", "arguments": {"command": command}}).decode()
    return f"<tool_call>\n{body}\n</tool_call>"
