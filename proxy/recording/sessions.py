"""Finds the caller of a request: API key -> attempt, and the attempt's tree of completions.

Sessions in memory are a cache: one that was forgotten, or lost to kill -9, is built again from the pool. On loopback an
unknown key (or none) opens a session of its own; elsewhere only issued keys are served.
"""

import asyncio
import time
from array import array
from collections import OrderedDict
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
from aiohttp import web

from proxy.augment.prompt_view import PromptView
from proxy.call import Call, CallError
from proxy.dialects import responses
from proxy.dialects.base import Dialect
from proxy.http.admission import FairThreads, OwnShareTaken
from proxy.http.auth import ISSUED_PREFIX, Access
from proxy.http.connections import ClientConnections
from proxy.http.limits import Reader, RequestLimits
from proxy.pool.completions.records import NewCompletion
from proxy.pool.completions.store import newer, paths
from proxy.pool.database import Pool
from proxy.pool.errors import PoolError, PoolReadError
from proxy.pool.processes.deliveries import settle_dead_proxies, undelivered_of
from proxy.pool.rollouts.attempts import Attempt, by_key, open_session
from proxy.pool.rollouts.budgets import note_spent, note_trouble, spent
from proxy.pool.rollouts.prompt_variations import PromptVariation
from proxy.prompt.continuation.request_shape import RequestShapes
from proxy.prompt.splice import Prompt, PromptBuilder
from proxy.prompt.template import ChatTemplate
from proxy.recording.redelivery.waiting import WaitingAnswers
from proxy.recording.stored_responses import StoredResponses

KEEP = 512
"""Sessions in memory; the least recently used one is forgotten first."""
KEEP_BYTES = 1 << 30
"""Token ids, remembered texts and kept messages of all sessions in memory; beyond, the least recently used session is
forgotten."""
RECHECK_SECONDS = 1.0
"""How long an attempt is assumed to be open without asking; the pool refuses replies of a closed one in any case."""


@dataclass
class Session:
    """One attempt with what the proxy keeps of it in memory."""

    attempt: Attempt
    prompts: PromptBuilder
    waiting: WaitingAnswers
    """Answers of the attempt that did not arrive and wait for a retry."""
    pool: Pool
    stored: StoredResponses
    view: PromptView
    """What the model is shown of the requests; the agent gets the answers in its own words."""
    shapes: RequestShapes = field(default_factory=RequestShapes)
    checked_at: float = field(default_factory=time.monotonic)

    def reader(self, dialect: Dialect) -> Reader:
        """How requests of a dialect are read: those of Responses may name what the attempt has stored."""
        return partial(responses.read, stored=self.stored) if dialect is responses else dialect.read

    def shown(self, call: Call, remember: bool = True) -> Call:
        """The request as the model is shown it, with ids for the calls and results that came without. `remember` as in
        `prepare`."""
        return self.prompts.with_ids(self.view.shown(call), self.catch_up, remember)

    def prepare(self, call: Call, splice: bool, remember: bool = True) -> Prompt:
        """Turn a request into tokens and find its place in the attempt. Any thread may call it.

        `remember=False`: none of its text is kept in memory for later requests.
        """
        prompt = self.prompts.build(call, splice, self.catch_up, remember)
        if call.stored is not None:
            self.stored.ready()
        shape = self.shapes.of(call, prompt.follows)
        prompt.shape = msgspec.structs.replace(shape, history=prompt.history)
        return prompt

    def add(self, id: int, item: NewCompletion, path: "array[int]", prompt: Prompt) -> None:
        """Add a committed completion. Any thread may call it."""
        self.prompts.add(id, item, path, prompt)
        self.shapes.add(id, item)

    def catch_up(self) -> None:
        """Add what other proxies have recorded of the attempt; PoolReadError for damaged rows. In any thread."""
        tree = self.prompts.tree
        rows = newer(self.pool, self.attempt.id, tree.read_to, tree.known_after(tree.read_to))
        shared = {row.prefix_of for row in rows if row.prefix_of is not None} - {row.id for row in rows}
        try:
            by_id = paths(rows, {id: tree.path(id) for id in shared})
        except (ValueError, KeyError) as error:
            raise PoolReadError(f"attempt {self.attempt.id} is damaged ({error}); see `proxy pool verify`") from error
        for row in rows:
            self.prompts.add(row.id, row, by_id[row.id])
            self.shapes.add(row.id, row)
        tree.read_to = max([tree.read_to, *by_id])


class Sessions:
    """All sessions of this proxy.

    `clock`: unix time for dates in templates; None: the beginning of each attempt. `variation`: what models are shown
    otherwise than agents write it; None: as each attempt says.
    """

    def __init__(
        self, pool: Pool, template: ChatTemplate, access: Access, connections: ClientConnections, *,
        threads: Executor, work: FairThreads, limits: RequestLimits, clock: float | None = None,
        variation: PromptVariation | None = None,
    ):  # fmt: skip
        self._pool = pool
        self._template = template
        self._threads = threads
        self._access = access
        self._connections = connections
        self._work = work
        self._limits = limits
        self._clock = clock
        self._variation = variation
        self._known: OrderedDict[str, Session] = OrderedDict()
        self._opening: dict[str, asyncio.Task[Session]] = {}

    async def of(self, request: web.Request) -> Session:
        """Find the session of the request's key; CallError 401 when the key is unknown or its attempt has ended, 429 or
        503 when it has too many connections."""
        key = self._access.agent_key(request)
        session = self._known.get(key)
        if session is None or time.monotonic() - session.checked_at > RECHECK_SECONDS:
            task = self._opening.get(key)
            if task is None:
                task = self._opening[key] = asyncio.create_task(self._check(key, session))
                task.add_done_callback(lambda _: self._opening.pop(key))
            session = await asyncio.shield(task)
        if key in self._known:
            self._known.move_to_end(key)
        self._connections.claim(request, session.attempt.id)
        return session

    async def check_budget(self, attempt: Attempt) -> None:
        """Raise CallError 403 when the attempt has used up its turns or tokens, and note that in its row."""
        if attempt.budget:
            await asyncio.get_running_loop().run_in_executor(self._threads, self._check_spent, attempt)

    async def note_trouble(self, attempt: Attempt, problem: CallError, started: float) -> None:
        """Note in the row of a run's attempt why a call failed that came at `started`, unless the agent is at fault.

        An attempt with trouble may be tried again, so no trouble is noted that an agent can make for itself.
        """
        troubled = problem.status >= 500 or (problem.status == 429 and not isinstance(problem, OwnShareTaken))
        if attempt.run_id is not None and troubled:
            with suppress(PoolError):  # the client gets the call's own error
                text = f"{problem.code}: {problem}"
                await asyncio.get_running_loop().run_in_executor(
                    self._threads, note_trouble, self._pool, attempt.id, text, started
                )

    def _check_spent(self, attempt: Attempt) -> None:
        budget = attempt.budget
        if used_up := spent(self._pool, attempt.id, budget):
            note_spent(self._pool, attempt.id, used_up)
            limit = {"turns": budget.turns, "tokens": budget.tokens}[used_up]
            raise CallError(
                403, "budget_exhausted", f"this attempt has used up its {limit} {used_up}; no further call is served"
            )

    async def stored(self, request: web.Request) -> StoredResponses | None:
        """What the attempt of the request's key has stored; None for a key that has opened no session."""
        key = self._access.agent_key(request)
        attempt = await asyncio.get_running_loop().run_in_executor(self._threads, self._issued, key)
        if attempt is None:
            return None
        self._connections.claim(request, attempt.id)
        known = self._known.get(key)
        view = PromptView(attempt.variation) if known is None else known.view
        return StoredResponses(self._pool, attempt.id, self._limits, view)

    async def admit(self, request: web.Request) -> None:
        """Raise what `of` would raise, without opening a session."""
        key = self._access.agent_key(request)
        await asyncio.get_running_loop().run_in_executor(self._threads, self._issued, key)

    async def _check(self, key: str, known: Session | None) -> Session:
        loop = asyncio.get_running_loop()
        try:
            attempt, new = await loop.run_in_executor(self._threads, self._attempt, key)
        except CallError:
            self._known.pop(key, None)
            raise
        if known:
            session = replace(known, attempt=attempt, checked_at=time.monotonic())
        else:
            clock = self._clock or attempt.dated_at
            view = PromptView(self._variation or attempt.variation)
            stored = StoredResponses(self._pool, attempt.id, self._limits, view)
            prompts = PromptBuilder(self._template, clock)
            session = Session(attempt, prompts, WaitingAnswers(), self._pool, stored, view)
            if not new:
                await self._work.run(attempt, self._load, session)
        if not new:
            answers = await loop.run_in_executor(self._threads, undelivered_of, self._pool, attempt.id)
            session.waiting.add(answers)
        self._known[key] = session
        self._forget()
        return session

    def _forget(self) -> None:
        sizes = {key: session.prompts.size for key, session in self._known.items()}
        held = sum(sizes.values())
        while len(self._known) > 1 and (len(self._known) > KEEP or held > KEEP_BYTES):
            forgotten, _ = self._known.popitem(last=False)
            held -= sizes[forgotten]

    def _attempt(self, key: str) -> tuple[Attempt, bool]:
        """The attempt of a key, and whether it was opened just now: then the pool has no completions of it."""
        issued = self._issued(key)
        return (open_session(self._pool, key), True) if issued is None else (issued, False)

    def _issued(self, key: str) -> Attempt | None:
        """The open attempt of a key; None for an unknown key that may open a session of its own."""
        attempt = by_key(self._pool, key)
        if attempt is None:
            if not self._access.open_to_all:
                raise CallError(
                    401, "invalid_api_key", "this key was not issued for a run; start agents by harness run"
                )
            if key.startswith(ISSUED_PREFIX):
                raise CallError(
                    401, "invalid_api_key", f"the pool {self._pool.name} has not issued this key; check --pool"
                )
            return None
        if not attempt.open:
            raise CallError(
                401, "invalid_api_key", f"attempt {attempt.id} has ended, its key is revoked; open a new one"
            )
        return attempt

    def _load(self, session: Session) -> None:
        session.catch_up()
        if session.prompts.tree.read_to:
            settle_dead_proxies(self._pool)  # another proxy served the attempt before, and may have crashed
