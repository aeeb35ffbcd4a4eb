"""A visitor without the token gets nothing, and every answer has the headers that keep texts from running."""

import asyncio

import aiohttp
import pytest
from sqlalchemy import text

from proxy.dashboard.access import HEADERS
from proxy.dashboard.app import STATIC
from proxy.pool.database import Pool, open_pool
from proxy.pool.errors import PoolWriteError, UserError
from proxy.pool.rollouts.groups import open_group
from proxy.pool.rollouts.runs import open_run, record_event
from tests.proxy.dashboard.conftest import Visit, Visitor
from tests.proxy.dashboard.make import Story

FILES = [path.relative_to(STATIC).as_posix() for path in STATIC.rglob("*") if path.suffix in (".js", ".css", ".html")]


async def test_a_visitor_without_the_token_gets_nothing(visitor: Visitor, told: Story) -> None:
    paths = [
        "",
        *FILES,
        "api/runs",
        f"api/rollouts/{told.rollouts[0]}",
        "api/live",
        "nowhere",
        "api/nowhere",
        "?token=",
    ]
    for path in paths:
        for headers in ({}, {"Authorization": "Bearer x"}, {"Cookie": "blackforge=x"}, {"Authorization": "Bearer ü"}):
            async with visitor.session.get(f"{visitor.url}/{path}", headers=headers) as response:
                body = await response.text()
                assert response.status == 401, path
                assert "train" not in body and "<" not in body and len(body) < 100
                assert HEADERS.items() <= response.headers.items()


async def test_the_token_of_the_address_becomes_a_cookie_and_leaves_the_address(visitor: Visitor) -> None:
    async with aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)) as browser:
        address = f"{visitor.url}/?token={visitor.token}&more=1"
        async with browser.get(address, allow_redirects=False) as response:
            assert response.status == 303 and response.headers["Location"] == "/?more=1"
            cookie = response.headers["Set-Cookie"]
            assert "HttpOnly" in cookie and "SameSite=Lax" in cookie and visitor.token in cookie
        async with browser.get(f"{visitor.url}/") as response:
            assert response.status == 200 and visitor.token not in await response.text()
        async with browser.get(f"{visitor.url}/api/runs") as response:
            assert response.status == 200
        async with browser.get(
            f"{visitor.url}//evil.example/?token={visitor.token}", allow_redirects=False
        ) as response:
            assert response.headers["Location"] == "/evil.example/"


async def test_another_host_and_another_site_get_nothing(visitor: Visitor) -> None:
    right = {"Authorization": f"Bearer {visitor.token}"}
    for headers in ({"Host": "evil.example:80"}, {"Host": "127.0.0.1.evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        async with visitor.session.get(f"{visitor.url}/api/runs", headers=right | headers) as response:
            assert response.status == 403


async def test_only_reading_is_served_and_every_answer_has_its_headers(visitor: Visitor, told: Story) -> None:
    headers = {"Authorization": f"Bearer {visitor.token}"}
    for path in ("", "app.js", "style.css", "uplot/uPlot.esm.js", "api/runs", "api/nowhere", "api/rollouts/99999"):
        async with visitor.session.get(f"{visitor.url}/{path}", headers=headers) as response:
            assert HEADERS.items() <= response.headers.items(), path
            if path.startswith("api/"):
                assert response.headers["Cache-Control"] == "no-store"
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        async with visitor.session.request(method, f"{visitor.url}/api/runs", headers=headers) as response:
            assert response.status == 405
    for path in ("..%2f..%2fapp.py", "uplot/../../app.py", "app.py", "static/app.js"):
        async with visitor.session.get(f"{visitor.url}/{path}", headers=headers) as response:
            assert response.status == 404


async def test_pages_hear_what_changes_and_no_rows(visit: Visit, database: str, pool: Pool) -> None:
    run = open_run(pool, "train", "train", None)
    visitor = await visit(database)
    headers = {"Authorization": f"Bearer {visitor.token}"}
    async with visitor.session.get(f"{visitor.url}/api/live", headers=headers) as response:
        assert response.content_type == "text/event-stream" and HEADERS.items() <= response.headers.items()
        lines = response.content
        await _until(lines, b'"parts":[]')
        open_group(pool, run.id, {"id": "new"}, 1)
        record_event(pool, run.id, "alarm", "secret text")
        event = await _until(lines, b'"parts":["')
        assert b"groups" in event and b"secret" not in event


async def _until(lines: aiohttp.StreamReader, part: bytes) -> bytes:
    async with asyncio.timeout(20):
        while part not in (line := await lines.readline()):
            pass
    return line


def test_a_pool_that_is_only_read_takes_no_write_and_is_not_brought_up_to_date(database: str, pool: Pool) -> None:
    reader = open_pool(database, create=False, read_only=True)
    with pytest.raises(PoolWriteError), reader.write() as connection:
        connection.execute(text("update runs set name = 'x'"))
    reader.close()
    with pool.write() as connection:
        connection.execute(text("update alembic_version set version_num = '0001'"))
    with pytest.raises(UserError, match="has schema 0001.*brings an older one up to date"):
        open_pool(database, create=False, read_only=True)


async def test_a_pool_that_is_gone_is_said_to_be_gone(visit: Visit, tmp_path: str) -> None:
    with pytest.raises(UserError, match="holds no pool"):
        await visit(f"sqlite:///{tmp_path}/none.db")
