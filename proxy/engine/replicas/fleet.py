"""All replicas of the engine: chooses one for each call, and another one when that fails.

Every replica has a circuit (circuit.py). The health of a lost replica is checked after growing pauses; if it returns
with other weights than the serving replicas have, it gets calls only after it was updated, or if it is held at them for
an evaluation. The same holds for one that a push has left behind: as soon as any replica serves the newest published
version, those with another get no calls. Calls that wait for an engine whose update has failed are broken off then.

While no replica is up that has weights of its run (run_needs.py), a run's call waits, and then goes on with what it had
sampled; the harness decides how long. A replica that had pushed weights and was restarted without them is loaded with
the newest from disk, as no trainer may be there to do so. Several proxies of one fleet agree by the hash; they do not
see each other's load. Left out: starting replicas, pushing new weights.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass

from proxy.engine.client import RESERVED_TOKENS
from proxy.engine.engine_call import EngineError, Sampling, SamplingRequest
from proxy.engine.moe_config import layered_cache
from proxy.engine.replicas.circuit import ELSEWHERE, LOST, REPLICA
from proxy.engine.replicas.outage import Outage
from proxy.engine.replicas.replica import KEPT_ORIGINS, Origin, Replica, SlotCall, SlotState
from proxy.engine.replicas.routing import choose, rates
from proxy.engine.replicas.run_needs import PUBLISHED, UNFINISHED, RunFacts, RunNeeds, published_name
from proxy.pool.errors import PoolReadError

log = logging.getLogger(__name__)
TRIES = 3
"""The most replicas that one call is tried on, one after the other; and the most that may die under it."""
CHECK_SECONDS = 5.0
"""Seconds between the checks of a serving replica's health and weights."""
BEHIND_SECONDS = 0.5
"""Seconds between the checks of a replica without the newest version: a push is probably updating it."""


@dataclass(frozen=True)
class Weights:
    """Weights on disk, and the name by which engines know them."""

    version: str
    directory: str


class Fleet:
    """All replicas, each watched by a task. Create it inside the running event loop."""

    def __init__(
        self,
        urls: Sequence[str],
        silence_seconds: float = 600,
        published: Callable[[], str] = lambda: "",
        successor: Callable[[str], Weights | None] = lambda version: None,
        of_run: Callable[[int, frozenset[str]], RunFacts] = lambda run_id, versions: RunFacts(),
        unattended_seconds: float = 60,
    ):
        """The functions are called in a thread and may raise PoolReadError.

        `published` returns the newest published version, "" where there is none; `successor` the weights that an engine
        should serve which served this version; `of_run` what the pool says about a run and these versions. No call of
        a run waits for an engine when no harness has worked at the run for `unattended_seconds`.
        """
        self._published, self._newest = published, ""
        self._successor, self._pushed = successor, ""  # the version last seen at any replica
        self._of_run, self._unattended_seconds = of_run, unattended_seconds
        self._outage = Outage()
        self._runs: dict[int, RunNeeds] = {}
        self.replicas = [Replica(url, silence_seconds) for url in urls]
        self._failed_for: OrderedDict[int, str] = OrderedDict()  # attempt -> the replica that failed its last call
        self._watching = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    async def close(self) -> None:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        for replica in self.replicas:
            await replica.client.close()

    async def healthy(self) -> bool:
        """Whether any replica answers its health check now."""
        return any(await asyncio.gather(*(replica.client.healthy() for replica in self.replicas)))

    @property
    def reserved_tokens(self) -> int:
        """The most tokens of the context that any replica keeps for itself: a call may go to each of them.

        Without replicas, as in a replay, what SGLang keeps without drafts.
        """
        return max((replica.reserved for replica in self.replicas), default=RESERVED_TOKENS)

    def route(self, origin: Origin) -> "Route":
        return Route(self, origin)

    def outage_of(self, run_id: int | None) -> Outage:
        """The times at which no engine is up that calls of this run may use; None: of no run."""
        if run_id is None:
            return self._outage
        if run_id not in self._runs:
            self._runs[run_id] = RunNeeds()
        return self._runs[run_id].outage

    def waited(self, attempt_id: int, within: float) -> float:
        """How many of the last `within` seconds the attempt's calls have waited while no engine was up for them."""
        outages = [self._outage, *(run.outage for run in self._runs.values())]
        return sum(outage.seconds(attempt_id, within) for outage in outages)

    def away(self, run_id: int | None = None) -> str:
        """Name the engines that are away, as the subject of a sentence; empty while one is up for the run."""
        run = self._needs(run_id)
        if (run.outage if run else self._outage).up:
            return ""
        if foreign := [f"{replica.url} serves {replica.version}" for replica in self.replicas if not replica.away]:
            return f"every engine with weights of the run ({', '.join(foreign)} until a trainer pushes to it)"
        only = self.replicas[0].away if len(self.replicas) == 1 else ""
        return only or f"every engine ({', '.join(replica.url for replica in self.replicas)})"

    def note_outage(self) -> None:
        """Keep account of whether any engine is up. To be called when a replica may have gone, come back or changed."""
        there = any(not replica.away for replica in self.replicas)
        self._outage.note(there, there)
        for run in self._runs.values():
            self._note_outage_of(run)

    def _note_outage_of(self, run: RunNeeds) -> None:
        if run.knows(self._published_names()):
            there = [replica.version for replica in self.replicas if not replica.away]
            run.outage.note(any(map(run.trains, there)), any(map(run.takes, there)))

    async def until_served(self, run_id: int) -> None:
        """Return when an engine is up that has weights of the run.

        EngineError when no harness has been at work for too long: nobody would say how long the call may wait.
        """
        outage = self.outage_of(run_id)
        while True:
            run = await self._look_up(run_id, CHECK_SECONDS)
            if not run.knows(self._published_names()):  # an engine got other weights while the pool answered
                continue
            if outage.ready:
                return
            if time.monotonic() - run.attended_at > self._unattended_seconds:
                away = self.away(run_id) or "every engine"
                raise EngineError("unreachable", f"{away} is away, and no harness works at the run any more")
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS):
                    await outage.over()

    async def _look_up(self, run_id: int, seconds: float) -> RunNeeds:
        """Ask the pool about a run, unless it was asked within these seconds about the versions that engines have."""
        run = self._runs[run_id]
        async with run.asking:
            names = self._published_names()
            if not run.knows(names) or time.monotonic() - run.asked_at > seconds:
                try:
                    facts = await asyncio.to_thread(self._of_run, run_id, names)
                except PoolReadError:
                    facts = None
                run.learn(names, facts)
            self._note_outage_of(run)
        return run

    def _published_names(self) -> frozenset[str]:
        return frozenset(published_name(replica.version) for replica in self.replicas)

    def _needs(self, run_id: int | None) -> RunNeeds | None:
        return None if run_id is None else self._runs.get(run_id)

    async def was_down(self, since: float, run_id: int) -> bool:
        """Check the replicas that calls have lost, then say whether no engine was up at some time after `since`."""
        doubtful = [replica for replica in self.replicas if replica.circuit.state == "open" and not replica.away]
        for replica in doubtful:
            if replica.checking is None or replica.checking.done():
                replica.checking = asyncio.create_task(self._check(replica))
        await asyncio.gather(*(asyncio.shield(replica.checking) for replica in doubtful if replica.checking))
        await self._look_up(run_id, CHECK_SECONDS)
        return self.outage_of(run_id).was_down(since)

    def pick(self, origin: Origin, length: int, tried: set[str]) -> SlotState:
        """The slot for a prompt of `length` tokens, on a replica that is not in `tried`."""
        slots = [state for replica in self._candidates(origin, tried) for state in replica.slots]
        if len(slots) == 1:
            return slots[0]
        measured = rates([state.meter for state in slots])
        loads = [state.load(origin, length, rate) for state, rate in zip(slots, measured, strict=True)]
        slot = choose(origin.key, length, loads)
        return next(state for state in slots if state.slot == slot)

    def others(self, tried: set[str], run_id: int | None = None) -> list[Replica]:
        """Replicas that may get calls and are not in `tried`; those with the newest weights where there are any.

        Calls of an evaluation go to those that are still at its version, where there are any.
        """
        run = self._needs(run_id)
        newest = run.newest if run and run.newest else self._newest
        admitted = [replica for replica in self.replicas if replica.circuit.admits() and self.takes(replica, run_id)]
        current = [replica for replica in admitted if replica.version == newest != ""]
        if run is not None:
            current = [one for one in admitted if run.prefers(one.url, one.version)] or current
        return [replica for replica in current or admitted if replica.url not in tried]

    def takes(self, replica: Replica, run_id: int | None) -> bool:
        """Whether calls of this run may go to the replica; those of no run may go anywhere."""
        run = self._needs(run_id)
        return run is None or run.takes(replica.version)

    def failed_for(self, attempt: int, url: str | None) -> None:
        """Note which replica failed the attempt's last call, so that a retry goes elsewhere; None: it was served."""
        self._failed_for.pop(attempt, None)
        if url is not None:
            self._failed_for[attempt] = url
            if len(self._failed_for) > KEPT_ORIGINS:
                self._failed_for.popitem(last=False)

    def _candidates(self, origin: Origin, tried: set[str]) -> list[Replica]:
        failed = self._failed_for.get(origin.attempt)
        candidates = self.others(tried | {failed}, origin.run) if failed else []
        # When all circuits are open, the call is sent all the same: failing is the worst that can happen. But an engine
        # that was restarted without its weights would not fail, so those that are not away come first.
        fit = [replica for replica in self.replicas if self.takes(replica, origin.run)]
        left = [replica for replica in fit if replica.url not in tried] or fit
        return candidates or self.others(tried, origin.run) or [one for one in left if not one.away] or left

    async def _watch(self, replica: Replica) -> None:
        """Check a replica until cancelled: regularly while it serves, after growing pauses while it does not."""
        while True:
            if replica.circuit.state == "open":
                pause = replica.circuit.pause()
                await asyncio.sleep(pause if self._outage.up else min(pause, CHECK_SECONDS))
            try:
                await self._check(replica)
                await self._look_up_runs()
            except Exception:  # a bug must not end the checks: nothing else brings a lost replica back
                log.exception("the check of %s failed", replica.url)
            if replica.circuit.state != "open":
                replica.woken.clear()
                behind = self._newest not in ("", replica.version)
                with suppress(TimeoutError):  # asyncio.wait_for would lose the cancelling of a watch that is just woken
                    async with asyncio.timeout(BEHIND_SECONDS if behind else CHECK_SECONDS):
                        await replica.woken.wait()

    async def _check(self, replica: Replica) -> None:
        try:
            version = await replica.client.version()
        except EngineError as error:
            replica.failed(error.kind)
            if replica.circuit.state == "open":
                replica.away = f"the engine at {replica.url}"
            self.note_outage()
            return
        if not replica.known and (server := await replica.client.description()) is not None:
            replica.described(server)
        seen = replica.version == version
        replica.serves(version)
        lost = replica.circuit.state == "open" or replica.away != ""
        if published := PUBLISHED.fullmatch(version):
            self._pushed = replica.pushed = published[1]
            if seen and published[2] in UNFINISHED and await self._serves_elsewhere(published[1]):
                # A paused SGLang 0.5.23 keeps new calls waiting where no abort reaches them.
                replica.client.break_off_silent(f"is paused as {version} while another one serves {published[1]}")
            if replica.away and published[2]:  # a push is at it
                return
        elif (pushed := replica.pushed or self._pushed) and lost:
            replica.away = f"the engine at {replica.url}, restarted without the weights {pushed},"
            self.note_outage()
            await self._restore(replica, pushed)
            return
        if version != self._newest:
            await self._look_up_newest()
        self.note_outage()
        serving = {other.version for other in self.others({replica.url})}
        wanted = any(version == run.newest or run.prefers(replica.url, version) for run in self._runs.values())
        if not serving or version in serving or version == self._newest or wanted:
            replica.circuit.answered()
            replica.away = ""
            self.note_outage()

    async def _serves_elsewhere(self, version: str) -> bool:
        """Whether a replica that gets calls serves this version now.

        A push resumes no engine before it has changed the last one. So an engine that is still paused then has failed.
        """
        for other in self.replicas:
            if other.version == version and other.circuit.admits():
                with suppress(EngineError):
                    if await other.client.version() == version:
                        return True
        return False

    async def _restore(self, replica: Replica, pushed: str) -> None:
        """Give a replica that was restarted the newest weights of the run of `pushed`, unless a trainer comes first."""
        try:
            weights = await asyncio.to_thread(self._successor, pushed)
            if weights is None:
                return
            log.warning("%s: loading %s", replica.away, weights.directory)
            await replica.client.load(weights.directory, weights.version)
            if await asyncio.to_thread(self._successor, pushed) != weights:
                # A push of newer weights may have come between: with this name, the trainer repeats it.
                await replica.client.rename(f"outdated-{weights.version}")
        except (EngineError, PoolReadError) as error:
            log.warning("%s: %s", replica.away, error)

    async def _look_up_newest(self) -> None:
        try:
            newest = await asyncio.to_thread(self._published)
        except PoolReadError:  # keep the last known version until the pool answers again
            return
        if newest != self._newest:
            self._newest = newest
            for replica in self.replicas:
                replica.woken.set()

    async def _look_up_runs(self) -> None:
        """Ask the pool about the runs that no replica serves the newest version of; forget those that have ended."""
        served = {replica.version for replica in self.replicas}
        for run_id, run in list(self._runs.items()):
            if self._runs.get(run_id) is not run:  # the watch of another replica has forgotten it meanwhile
                continue
            unseen = time.monotonic() - run.attended_at > self._unattended_seconds
            if unseen or (run.newest not in served and (run.outage.busy or not run.outage.up)):
                await self._look_up(run_id, BEHIND_SECONDS)
            if unseen and not run.outage.busy and time.monotonic() - run.attended_at > self._unattended_seconds:
                self._runs.pop(run_id, None)


class Route:
    """The way of one call through the replicas."""

    def __init__(self, fleet: Fleet, origin: Origin):
        self._fleet = fleet
        self._origin = origin
        self._tried: set[str] = set()
        self._state: SlotState | None = None
        self._deaths = 0
        """How many engines have died under this call."""

    async def sample(self, request: SamplingRequest, into: Sampling) -> AsyncGenerator[list[int], None]:
        """Sample like EngineClient.sample, at the best slot whose replica was not tried for this call.

        A call of a run waits while no engine is up for it, and goes on behind what it has sampled.
        """
        while True:
            asked = time.monotonic()
            if self._origin.run is not None:
                await self._fleet.until_served(self._origin.run)
            into.queued(asked)
            sent = time.monotonic()
            state = self._state = self._slot(request, into)
            call = SlotCall(state, self._origin, request)
            try:
                async with aclosing(state.replica.client.sample(state.addressed(request), into)) as events:
                    async for ids in events:
                        call.sampled(into)
                        yield ids
                call.served(into)
                self._fleet.failed_for(self._origin.attempt, None)
                return
            except EngineError as error:
                problem = error
                self._note_failure(state.replica, error)
            finally:
                call.end()
            if not await self._outlasts(problem, sent, request, into):
                raise problem
            self._tried.clear()
            self._state = None
            request = request.behind(into.break_off(), (), ())
            if request.max_new_tokens <= 0:  # the engine was lost when it had sampled all
                into.finish = "length"
                return

    async def _outlasts(self, error: EngineError, sent: float, request: SamplingRequest, into: Sampling) -> bool:
        """Whether the call goes on after this error, because no engine was up since it was sent."""
        if error.kind != "unreachable":
            self._deaths += 1
        run_id = self._origin.run
        if run_id is None or error.kind not in LOST or self._deaths > TRIES:
            return False
        if request.grammar is not None and into.fresh:  # an engine applies a grammar from its first token on
            return False
        return await self._fleet.was_down(sent, run_id)

    def _slot(self, request: SamplingRequest, into: Sampling) -> SlotState:
        """The slot to sample at. The rest of an answer is sampled where its beginning was, whose prefix is cached
        there."""
        state = self._state
        if state is None or not into.logprobs or not self._fleet.takes(state.replica, self._origin.run):
            state = self._fleet.pick(self._origin, request.prompt_length, self._tried)
        self._tried.add(state.replica.url)
        if into.experts is not None and state.replica.layered:
            raise EngineError("no_experts", layered_cache(f"the engine at {state.replica.url}"))
        return state

    def _note_failure(self, replica: Replica, error: EngineError) -> None:
        if error.kind in REPLICA:
            replica.failed(error.kind)
            if error.kind == "unreachable":
                replica.away = f"the engine at {replica.url}"
                self._fleet.note_outage()
            self._fleet.failed_for(self._origin.attempt, replica.url)

    def goes_on(self, error: EngineError) -> bool:
        """Whether another replica may sample the call again; only for calls of which nothing has reached the client."""
        others = self._fleet.others(self._tried, self._origin.run)
        return error.kind in ELSEWHERE and len(self._tried) < TRIES and bool(others)
