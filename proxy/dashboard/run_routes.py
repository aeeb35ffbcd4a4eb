"""JSON about runs: the list, one run, its curves, its queue, its account, its groups."""

from typing import Any

from aiohttp import web

from proxy.dashboard.answers import answer, chosen, number, required
from proxy.dashboard.reader import Read
from proxy.pool.browse.evaluated import evaluation_matrix
from proxy.pool.browse.groups import group_view, groups_page
from proxy.pool.browse.queue import queue
from proxy.pool.browse.rewards import run_rewards
from proxy.pool.browse.runs import PAGE, alarms, run_entry, run_names, runs_page
from proxy.pool.browse.sessions import PAGE as SESSIONS
from proxy.pool.browse.sessions import sessions_page
from proxy.pool.browse.steps import MOST_POINTS, curves, metric_names
from proxy.pool.browse.traffic import traffic
from proxy.pool.database import Pool
from proxy.pool.inspect.account import account
from proxy.pool.inspect.rule_states import rule_states
from proxy.pool.rollouts.runs import find_run
from proxy.pool.training.interventions import history_of

MOST_INTERVENTIONS = 200
"""The newest interventions that are shown."""


class RunRoutes:
    """The routes of one pool."""

    def __init__(self, pool: Pool, read: Read):
        self._pool = pool
        self._read = read

    def add(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/api/runs", self._runs)
        router.add_get("/api/run-names", self._names)
        router.add_get("/api/sessions", self._sessions)
        router.add_get("/api/runs/{run}", self._run)
        router.add_get("/api/runs/{run}/curves", self._curves)
        router.add_get("/api/runs/{run}/rewards", self._rewards)
        router.add_get("/api/runs/{run}/evaluations", self._evaluations)
        router.add_get("/api/runs/{run}/queue", self._queue)
        router.add_get("/api/runs/{run}/account", self._account)
        router.add_get("/api/runs/{run}/groups", self._groups)
        router.add_get("/api/groups/{group}", self._group)

    async def _runs(self, request: web.Request) -> web.Response:
        """Answer with a page of the pool's runs, newest first, and what alarms at those that somebody works at."""
        entries = await self._read(runs_page, self._pool, number(request.query, "before"))
        busy = await self._read(traffic, self._pool, {entry.id: entry.name for entry in entries})
        before = entries[-1].id if len(entries) == PAGE else None
        loud = await self._read(alarms, self._pool)
        page = {"runs": entries, "before": before, "traffic": busy, "alarms": loud}
        return answer({"pool": self._pool.name} | page)

    async def _names(self, request: web.Request) -> web.Response:
        """Answer with the names of runs that have a text in them."""
        wanted = (chosen(request.query, "like") or "", chosen(request.query, "stepped") is not None)
        return answer({"names": await self._read(run_names, self._pool, *wanted)})

    async def _sessions(self, request: web.Request) -> web.Response:
        """Answer with a page of sessions: agents that no run started."""
        entries = await self._read(sessions_page, self._pool, number(request.query, "before"))
        before = entries[-1].id if len(entries) == SESSIONS else None
        return answer({"sessions": entries, "before": before})

    async def _run(self, request: web.Request) -> web.Response:
        """Answer with a run, its settings, the names of its metrics, its monitor's rules and interventions."""
        return answer(await self._read(_whole_run, self._pool, request.match_info["run"]))

    async def _curves(self, request: web.Request) -> web.Response:
        """Answer with metrics of a run, at evenly spread steps where there are too many."""
        given = request.query
        bounds = (number(given, "first"), number(given, "last"), number(given, "points", MOST_POINTS))
        names = [name for name in given.getall("names", []) if name]
        return answer(await self._read(_curves_of, self._pool, request.match_info["run"], names, *bounds))

    async def _rewards(self, request: web.Request) -> web.Response:
        """Answer with the points of a run's evaluations."""
        return answer(await self._read(_of_run, run_rewards, self._pool, request.match_info["run"]))

    async def _evaluations(self, request: web.Request) -> web.Response:
        """Answer with the matrix of what was trained and what was evaluated."""
        return answer(await self._read(_of_run, evaluation_matrix, self._pool, request.match_info["run"]))

    async def _queue(self, request: web.Request) -> web.Response:
        """Answer with the queue of a run: its slots, the window, who waits for whom."""
        return answer(await self._read(_of_run, queue, self._pool, request.match_info["run"]))

    async def _account(self, request: web.Request) -> web.Response:
        """Answer with where every sampled token of a run is."""
        now = await self._read(_of_run, account, self._pool, request.match_info["run"])
        return answer({
            "sampled": now.sampled,
            "trained": now.trained,
            "left_out": now.left_out,
            "waiting": now.waiting,
            "imitated": now.imitated,
            "replayed": now.replayed,
            "unaccounted": now.unaccounted,
        })  # fmt: skip

    async def _groups(self, request: web.Request) -> web.Response:
        """Answer with a page of a run's groups, newest first."""
        given = request.query
        wanted = (number(given, "before"), chosen(given, "state"), number(given, "step"))
        return answer(await self._read(groups_page, self._pool, request.match_info["run"], *wanted))

    async def _group(self, request: web.Request) -> web.Response:
        """Answer with a group and its members."""
        return answer(await self._read(group_view, self._pool, required(request.match_info, "group")))


def _of_run(work: Any, pool: Pool, name: str) -> Any:
    return work(pool, run_entry(pool, name).id)


def _curves_of(pool: Pool, name: str, names: list[str], *bounds: Any) -> Any:
    return curves(pool, run_entry(pool, name).id, names, *bounds)


def _whole_run(pool: Pool, name: str) -> dict[str, Any]:
    entry = run_entry(pool, name)
    return {
        "run": entry,
        "config": find_run(pool, name).config,
        "metrics": metric_names(pool, entry.id),
        "rules": rule_states(pool, entry.id),
        "interventions": history_of(pool, entry.id, MOST_INTERVENTIONS),
    }
