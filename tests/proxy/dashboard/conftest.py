"""Fixtures: a filled pool on each database, and a dashboard of it on a real port."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from proxy.dashboard.app import Dashboard, DashboardOptions
from proxy.pool.database import Pool, open_pool
from tests import postgres
from tests.proxy.dashboard.browser import close_browser
from tests.proxy.dashboard.make import Story, story


@pytest.fixture(scope="session", autouse=True)
def browser() -> Iterator[None]:
    """Closes the browser after the last test."""
    yield
    close_browser()


@pytest.fixture
def pool(database: str) -> Iterator[Pool]:
    """A fresh pool that can be written."""
    opened = open_pool(database)
    yield opened
    opened.close()


@dataclass(frozen=True)
class Filled:
    """A filled pool that many tests look at and none changes."""

    url: str
    story: Story


@pytest.fixture(scope="session")
def filled_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Filled:
    return _filled(f"sqlite:///{tmp_path_factory.mktemp('dashboard') / 'pool.db'}")


@pytest.fixture(scope="session")
def filled_postgres(postgres_server: postgres.Server) -> Filled:
    return _filled(postgres_server.database())


def _filled(url: str) -> Filled:
    pool = open_pool(url)
    told = story(pool)
    pool.close()
    return Filled(url, told)


@pytest.fixture(params=["sqlite", "postgres"])
def filled(request: pytest.FixtureRequest) -> Filled:
    """A filled pool on SQLite, and one on PostgreSQL."""
    found: Filled = request.getfixturevalue(f"filled_{request.param}")
    return found


@pytest.fixture
def told(filled: Filled) -> Story:
    """What the filled pool holds."""
    return filled.story


@dataclass(frozen=True)
class Visitor:
    """Somebody with the token."""

    url: str
    token: str
    session: aiohttp.ClientSession

    async def ask(self, path: str, status: int = 200, **given: Any) -> Any:
        """The JSON that the dashboard answers with."""
        headers = {"Authorization": f"Bearer {self.token}"}
        async with self.session.get(f"{self.url}/api/{path}", params=given, headers=headers) as response:
            body = await response.json()
            assert response.status == status, body
            return body


Visit = Callable[..., Awaitable[Visitor]]


@pytest.fixture
async def visit(tmp_path: Path) -> AsyncIterator[Visit]:
    """Serves a dashboard of a pool, and comes as a visitor."""
    async with AsyncExitStack() as stack:

        async def start(url: str, **options: Any) -> Visitor:
            reader = open_pool(url, create=False, read_only=True)
            stack.callback(reader.close)
            dashboard = Dashboard(reader, DashboardOptions(**{"index": tmp_path / "index.search"} | options))
            runner = web.AppRunner(dashboard.app(), access_log=None, shutdown_timeout=1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = runner.addresses[0][1]
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return Visitor(f"http://127.0.0.1:{port}", dashboard.access.token, session)

        yield start


@pytest.fixture
async def visitor(visit: Visit, filled: Filled) -> Visitor:
    """Somebody with the token, at a dashboard of the filled pool."""
    return await visit(filled.url)
