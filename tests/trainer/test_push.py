"""Weights into engines: the order of calls, versions that are checked, a push repeated on resume."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from proxy.pool import runs, steps
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from tests.trainer.test_loop import prepare
from trainer.config import Push
from trainer.push import Weights, lost, push

WEIGHTS = Weights("v7", Path("/models/seven"))


class Recorder:
    """An engine that notes what it is asked and serves the version it is told, or another one."""

    def __init__(self, obedient: bool = True):
        self.calls: list[str] = []
        self.version, self.obedient = "initial", obedient

    async def answer(self, request: web.Request) -> web.Response:
        self.calls.append(request.path.strip("/"))
        body = await request.json() if request.can_read_body else {}
        if "weight_version" in body and self.obedient:
            self.version = body["weight_version"]
        return web.json_response({"success": True, "weight_version": self.version, "message": "as told"})


@pytest.fixture
async def engines() -> AsyncIterator[list[tuple[Recorder, str]]]:
    found = []
    servers = []
    for obedient in (True, True, False):
        recorder, app = Recorder(obedient), web.Application()
        app.router.add_route("*", "/{path}", recorder.answer)
        await (server := TestServer(app)).start_server()
        servers.append(server)
        found.append((recorder, str(server.make_url("")).rstrip("/")))
    yield found
    for server in servers:
        await server.close()


async def test_every_engine_is_paused_loaded_checked_and_continued(engines: list[tuple[Recorder, str]]) -> None:
    (first, one), (second, two), _ = engines
    paused = await asyncio.to_thread(push, WEIGHTS, Push(engines=(one, two)))
    order = ["pause_generation", "update_weights_from_disk", "model_info", "continue_generation"]
    assert first.calls == order and second.calls == order
    assert first.version == second.version == "v7" and paused > 0


async def test_an_engine_that_was_started_anew_is_noticed_and_one_that_is_down_is_left(
    engines: list[tuple[Recorder, str]],
) -> None:
    (first, one), (_, two), _ = engines
    options = Push(engines=(one, two, "http://127.0.0.1:9"))
    await asyncio.to_thread(push, WEIGHTS, Push(engines=(one, two)))
    assert await asyncio.to_thread(lost, WEIGHTS, options) == []
    first.version = "initial"
    assert await asyncio.to_thread(lost, WEIGHTS, options) == [one]


async def test_an_engine_that_serves_something_else_is_named_and_nobody_stays_paused(
    engines: list[tuple[Recorder, str]],
) -> None:
    (good, one), _, (bad, three) = engines
    with pytest.raises(UserError, match=f"engine {three} serves weights 'initial' instead of 'v7'"):
        await asyncio.to_thread(push, WEIGHTS, Push(engines=(one, three)))
    assert good.calls[-1] == bad.calls[-1] == "continue_generation"


async def test_an_engine_that_is_down_is_named() -> None:
    with pytest.raises(
        UserError, match="engine http://127.0.0.1:9 failed at /pause_generation .*start the trainer again"
    ):
        await asyncio.to_thread(push, WEIGHTS, Push(engines=("http://127.0.0.1:9",), tries=1))


async def launch(directory: Path, url: str) -> int:
    command = ["-m", "trainer", "launch", str(directory / "trainer.toml"), "--set", f'push.engines=["{url}"]']
    process = await asyncio.create_subprocess_exec(sys.executable, *command, "--steps=1", "--set", "push.tries=1")
    return await process.wait()


async def test_a_push_that_failed_is_repeated_by_the_next_start(
    engines: list[tuple[Recorder, str]], tmp_path: Path
) -> None:
    directory = prepare(tmp_path)
    pool = open_pool(str(directory / "pool.db"))
    assert await launch(directory, engines[2][1]) == 2
    version = steps.latest(pool, runs.find_run(pool, "demo").id)
    assert version is not None and (version.step, version.pushed_at) == (0, None)
    engine, url = engines[0]
    assert await launch(directory, url) == 0
    version = steps.latest(pool, runs.find_run(pool, "demo").id)
    assert version is not None and version.pushed_at is not None and engine.version == version.name
    assert engine.calls.count("update_weights_from_disk") == 2
