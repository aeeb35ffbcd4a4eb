"""JSON about search: hits of words and filters, and how much of the pool is in the index."""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from proxy.dashboard.answers import answer, chosen, number, real
from proxy.dashboard.indexer import Indexer
from proxy.dashboard.reader import Read
from proxy.pool.behaviour.event import Kind
from proxy.pool.browse.runs import run_entry
from proxy.pool.database import Pool
from proxy.pool.errors import PoolError
from proxy.pool.rollouts.failures import FAILURES
from proxy.pool.search.behaviour import run_behaviour
from proxy.pool.search.build import progress
from proxy.pool.search.index import reading
from proxy.pool.search.query import Wanted, search
from proxy.pool.search.results import found


class SearchRoutes:
    """The routes of one pool."""

    def __init__(self, pool: Pool, read: Read, indexer: Indexer):
        self._pool = pool
        self._read = read
        self._indexer = indexer

    def add(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/api/search", self._search)
        router.add_get("/api/search/index", self._index)
        router.add_get("/api/runs/{run}/behaviour", self._behaviour)

    async def _search(self, request: web.Request) -> web.Response:
        """Answer with rollouts that match words and filters."""
        return answer(await self._read(self._found, dict(request.query)))

    async def _index(self, _: web.Request) -> web.Response:
        """Answer with how much of the pool is in the search index."""
        return answer(await self._read(self._state))

    async def _behaviour(self, request: web.Request) -> web.Response:
        """Answer with what the newest rollouts of a run did, added up."""
        return answer(await self._read(self._added_up, request.match_info["run"]))

    def _added_up(self, run: str) -> dict[str, Any]:
        run_id = run_entry(self._pool, run).id
        with self._opened() as index:
            figures = None if index is None else run_behaviour(index, run_id)
        return {"figures": figures, "index": self._state()}

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection | None]:
        try:
            with reading(self._indexer.file) as index:
                yield index
        except sqlite3.Error as error:
            raise PoolError(f"the search index {self._indexer.file} cannot be read ({error}); delete it") from error

    def _found(self, given: Mapping[str, str]) -> dict[str, Any]:
        wanted, before = self._wanted(given), number(given, "before")
        with self._opened() as index:
            if index is None:
                return {"hits": [], "before": None, "index": self._state()}
            page = search(index, wanted, before)
        return {"hits": found(self._pool, page.hits, wanted.words), "before": page.before, "index": self._state()}

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "file": str(self._indexer.file), "trouble": self._indexer.trouble, "progress": None,
            "kinds": list(Kind), "failures": list(FAILURES),
        }  # fmt: skip
        try:
            with reading(self._indexer.file) as index:
                state["progress"] = None if index is None else progress(index)
        except sqlite3.Error as error:
            state["trouble"] = str(error)
        return state

    def _wanted(self, given: Mapping[str, str]) -> Wanted:
        run = chosen(given, "run")
        return Wanted(
            words=chosen(given, "q") or "",
            run_id=None if run is None else run_entry(self._pool, run).id,
            agent=chosen(given, "agent"),
            domain=chosen(given, "domain"),
            failure=chosen(given, "failure"),
            event=chosen(given, "event"),
            least_reward=real(given, "least_reward"),
            most_reward=real(given, "most_reward"),
            no_reward=chosen(given, "no_reward") is not None,
            least_tokens=number(given, "least_tokens"),
            most_tokens=number(given, "most_tokens"),
            least_calls=number(given, "least_calls"),
            most_calls=number(given, "most_calls"),
        )
