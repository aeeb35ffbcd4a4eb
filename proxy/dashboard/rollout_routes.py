"""JSON about rollouts: verdict, attempts, the tree of calls, a conversation, tokens, events."""

from pathlib import Path

from aiohttp import web

from proxy.dashboard.answers import answer, number, required
from proxy.dashboard.reader import Read
from proxy.pool.browse.attempts.acts import attempt_events
from proxy.pool.browse.attempts.attempt import attempt_view, calls_page
from proxy.pool.browse.attempts.conversation import conversation, reply_piece
from proxy.pool.browse.attempts.logs import log_piece
from proxy.pool.browse.rollout import rollout_view
from proxy.pool.browse.tokens.page import token_page
from proxy.pool.database import Pool


class RolloutRoutes:
    """The routes of one pool."""

    def __init__(self, pool: Pool, read: Read, model: Path | None):
        self._pool = pool
        self._read = read
        self._model = model

    def add(self, router: web.UrlDispatcher) -> None:
        """Add the routes."""
        router.add_get("/api/rollouts/{rollout}", self._rollout)
        router.add_get("/api/attempts/{attempt}", self._attempt)
        router.add_get("/api/attempts/{attempt}/calls", self._calls)
        router.add_get("/api/attempts/{attempt}/events", self._events)
        router.add_get("/api/attempts/{attempt}/log", self._log)
        router.add_get("/api/completions/{completion}/conversation", self._conversation)
        router.add_get("/api/completions/{completion}/reply", self._reply)
        router.add_get("/api/completions/{completion}/tokens", self._tokens)

    async def _rollout(self, request: web.Request) -> web.Response:
        """Answer with a rollout, its verdict and its attempts."""
        return answer(await self._read(rollout_view, self._pool, required(request.match_info, "rollout")))

    async def _attempt(self, request: web.Request) -> web.Response:
        """Answer with an attempt."""
        return answer(await self._read(attempt_view, self._pool, required(request.match_info, "attempt")))

    async def _calls(self, request: web.Request) -> web.Response:
        """Answer with a page of an attempt's model calls."""
        wanted = (required(request.match_info, "attempt"), number(request.query, "first", 0))
        return answer(await self._read(calls_page, self._pool, *wanted))

    async def _events(self, request: web.Request) -> web.Response:
        """Answer with what an attempt's agent did, as events."""
        return answer(await self._read(attempt_events, self._pool, required(request.match_info, "attempt")))

    async def _log(self, request: web.Request) -> web.Response:
        """Answer with a piece of an attempt's log."""
        wanted = (
            required(request.match_info, "attempt"),
            number(request.query, "offset"),
            number(request.query, "until"),
        )
        return answer(await self._read(log_piece, self._pool, *wanted))

    async def _conversation(self, request: web.Request) -> web.Response:
        """Answer with the turns that lead to a completion, and it."""
        return answer(await self._read(conversation, self._pool, required(request.match_info, "completion")))

    async def _reply(self, request: web.Request) -> web.Response:
        """Answer with a piece of a reply."""
        wanted = (required(request.match_info, "completion"), number(request.query, "offset", 0))
        return answer(await self._read(reply_piece, self._pool, *wanted))

    async def _tokens(self, request: web.Request) -> web.Response:
        """Answer with a page of a completion's tokens: text, logprob, version, what the trainer said."""
        wanted = (required(request.match_info, "completion"), number(request.query, "offset", 0))
        return answer(await self._read(token_page, self._pool, *wanted, self._model))
