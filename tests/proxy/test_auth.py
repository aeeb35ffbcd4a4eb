"""Access: an attempt's key opens the model routes while the attempt is open, the admin key opens all other routes."""

import re
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from proxy.commands.main import main
from proxy.config import EngineConfig, GatewayConfig, ProxyConfig
from proxy.http.auth import is_loopback
from proxy.pool.completions.store import of_attempt
from proxy.pool.database import Pool
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import Attempt, Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run
from proxy.server import Gateway
from tests.proxy.conftest import Serve, Stand, listening, user

ADMIN = "the admin key of this test"
CALLS: dict[str, Any] = {
    "/v1/chat/completions": {"messages": [user("hi")]},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": [user("hi")], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [user("hi")]},
    "/v1/completions": {"prompt": "hi"},
    "/v1beta/models/m:generateContent": {"contents": [{"parts": [{"text": "hi"}]}]},
    "/v1beta/models/m:streamGenerateContent?alt=sse": {"contents": [{"parts": [{"text": "hi"}]}]},
    "/v1beta/models/m:countTokens": {"contents": [{"parts": [{"text": "hi"}]}]},
    "/v1/models": None,
    "/v1/models/m": None,
}
RECORDED = [path for path in CALLS if "count" not in path and CALLS[path] is not None]


def attempts(pool: Pool) -> Iterator[tuple[Attempt, str]]:
    """Attempts of a run with their keys."""
    run = open_run(pool, "r", "train", {})
    for rollout in open_group(pool, run.id, {"id": "t", "domain": "agent"}, 2):
        yield open_attempt(pool, rollout.rollout_id, "command")


async def status(stand: Stand, path: str, **headers: str) -> int:
    """The status of a valid request with these keys. An error must be in the dialect's format."""
    body = CALLS[re.sub("^/r/[^/]*", "", path)]
    method = "GET" if body is None else "POST"
    async with stand.http.request(method, stand.url + path, json=body, headers=headers) as answer:
        whole = await answer.read()  # what is not read to its end has not arrived, and the next call gets it
        if answer.status != 200:
            assert msgspec.json.decode(whole)["error"]["message"]
        return answer.status


def carriers(key: str) -> list[dict[str, str]]:
    """The headers that may carry a key."""
    return [{"Authorization": f"Bearer {key}"}, {"x-api-key": key}, {"x-goog-api-key": key}, {"api-key": key}]


async def test_an_attempts_key_opens_every_model_route_and_records_under_its_attempt(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok", host="0.0.0.0")
    (own, key), (other, _) = attempts(stand.pool)
    for path, headers in product(CALLS, carriers(key)):
        assert await status(stand, path, **headers) == 200
    for path in CALLS:
        assert await status(stand, f"/r/{key}{path}") == 200
    assert len(of_attempt(stand.pool, own.id)) == 5 * len(RECORDED) and of_attempt(stand.pool, other.id) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_key_dies_with_its_attempt_on_every_route(serve: Serve, host: str) -> None:
    stand = await serve(lambda prompt, ids: "ok", host=host, limits={"free_refusals": 1000})
    (attempt, key), _ = attempts(stand.pool)
    close_attempt(stand.pool, attempt.id, Ending())
    for path, headers in product(CALLS, carriers(key)):
        assert await status(stand, path, **headers) == 401
        assert await status(stand, f"/r/{key}{path}") == 401
    assert of_attempt(stand.pool, attempt.id) == []


@pytest.mark.parametrize("key", ["stranger", "bf-never-issued", "", "bf-" + "x" * 600, "n\u00fc\u00a0ll", "\udcff"])
async def test_a_key_that_was_not_issued_opens_nothing_off_loopback(serve: Serve, key: str) -> None:
    stand = await serve(lambda prompt, ids: "ok", host="0.0.0.0")
    for path in CALLS:
        assert await status(stand, path, **{"x-api-key": key}) == 401


async def test_two_attempts_in_one_request_contradict(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    (own, key), (other, second) = attempts(stand.pool)
    for path, headers in product(CALLS, carriers(second)):
        assert await status(stand, f"/r/{key}{path}", **headers) == 400
        assert await status(stand, f"/r/somebody{path}", **headers) == 400
    assert await status(stand, "/v1/models", **{"x-api-key": key, "x-goog-api-key": second}) == 400
    assert not of_attempt(stand.pool, own.id) and not of_attempt(stand.pool, other.id)


async def test_an_issued_key_counts_before_the_key_that_a_tool_always_sends(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    (own, key), _ = attempts(stand.pool)
    always = {"Authorization": "Bearer EMPTY"}
    assert await status(stand, f"/r/{key}/v1/completions", **always) == 200
    assert await status(stand, "/v1/completions", **always, **{"x-api-key": key}) == 200
    assert len(of_attempt(stand.pool, own.id)) == 2 and stand.recorded("EMPTY") == []


@pytest.mark.parametrize("path", CALLS)
async def test_other_methods_are_refused_in_the_dialects_form(serve: Serve, path: str) -> None:
    stand = await serve(lambda prompt, ids: "ok")
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "POST" if CALLS[path] is None else "GET"):
        async with stand.http.request(method, stand.url + path) as answer:
            assert answer.status == 405 and (await answer.json())["error"]["message"]


async def test_the_admin_key_opens_health_and_no_model_route(serve: Serve) -> None:
    stand = await serve(lambda prompt, ids: "ok", admin_key=ADMIN)
    for path, headers in product(CALLS, carriers(ADMIN)):
        assert await status(stand, path, **headers) == 403
    assert stand.recorded(ADMIN) == [] and await health(stand, **carriers(ADMIN)[0]) > {"model", "engine", "pool"}
    _, (_, key) = attempts(stand.pool)
    for headers in ({}, *carriers(key), *carriers(ADMIN[:-1]), *carriers(f"{ADMIN}x")):
        assert await health(stand, **headers) == {"status"}


async def health(stand: Stand, **headers: str) -> set[str]:
    async with stand.http.get(f"{stand.url}/health", headers=headers) as answer:
        assert answer.status == 200
        return set(await answer.json())


async def test_routes_that_are_added_later_are_the_administrators(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(ADMIN)
    proxy = GatewayConfig(admin_key_file=str(tmp_path / "key"))
    gateway = Gateway(
        ProxyConfig(engine=EngineConfig(model=str(tiny_model)), pool=str(tmp_path / "pool.db"), proxy=proxy), "http://x"
    )
    app = gateway.app()

    async def new_route(_request: web.Request) -> web.Response:
        return web.Response(text="told")

    app.router.add_get("/new", new_route)
    async with AsyncExitStack() as stack:
        url = await listening(app, stack)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        given: list[tuple[dict[str, str], int]]
        given = [({}, 401), (carriers("bf-guess")[0], 401), (carriers(ADMIN)[0], 200)]
        for path, (headers, expected) in product(("/new", "/metrics"), given):
            async with http.get(url + path, headers=headers) as answer:
                assert answer.status == expected


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "a.name", "127.0.0", "::ffff:7f00:1"])
def test_only_loopback_without_an_admin_key(
    host: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_loopback(host)
    config = tmp_path / "proxy.toml"
    config.write_text(f'[engine]\nmodel = "{tiny_model}"\nurl = "http://127.0.0.1:9"\n[proxy]\nhost = "{host}"\n')
    assert main(["serve", str(config)]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.partition(" (see ")[0].endswith(host) and "proxy.admin_key_file" in sentence


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_admin_key(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    ("key", "fields", "sentence"),
    [
        (None, {"admin_key_file": "{}/gone"}, "cannot be read"),
        ("", {"admin_key_file": "{}/key"}, "has 0 characters"),
        ("short", {"admin_key_file": "{}/key"}, "has 5 characters, and it needs at least 16"),
        ("\u00fc" * 20, {"admin_key_file": "{}/key"}, "printable ASCII"),
    ],
)
def test_an_admin_key_that_is_none(
    key: str | None, fields: dict[str, str], sentence: str, tmp_path: Path, tiny_model: Path
) -> None:
    if key is not None:
        (tmp_path / "key").write_text(key)
    proxy = msgspec.convert({name: value.format(tmp_path) for name, value in fields.items()}, GatewayConfig)
    with pytest.raises(UserError, match=sentence) as raised:
        Gateway(ProxyConfig(engine=EngineConfig(model=str(tiny_model)), proxy=proxy), "http://x")
    assert not key or key not in str(raised.value)
