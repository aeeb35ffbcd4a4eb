"""Notes who sends keys that are refused, and lets a source that goes on with it wait.

A source is an address; all that comes through a Unix socket is one source. The log names the source and the reason,
never the key, at the 1st, 2nd, 4th, 8th ... refusal of a source, so that a flood cannot fill the disk. Only refusals
wait: a valid key is answered at once, whatever its source did before. Left out: headers of servers in front (anybody
can write X-Forwarded-For), and blocking a source.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from proxy.call import CallError
from proxy.http.limits import RequestLimits
from proxy.http.redact import redacted

log = logging.getLogger(__name__)
CODES = frozenset(("invalid_api_key", "permission_denied"))
"""Errors that refuse a key."""
FIRST_WAIT_SECONDS = 0.1
MAX_WAIT_SECONDS = 10.0
QUIET_SECONDS = 600
"""A source that sends no refused key for this long begins again."""
MAX_SOURCES = 1024
"""Sources that are remembered; the one that was seen longest ago is forgotten first."""
NOTES_PER_MINUTE = 30
"""Most lines of log in a minute, from all sources; the others are counted, and the next line says how many."""

Note = Callable[[str, str], None]
"""Writes an event: its kind and what is particular about it."""


@dataclass
class _Source:
    refusals: int = 0
    seen_at: float = 0.0


class RefusedKeys:
    """Counts refused keys by source. `note` is called with each refusal that is logged."""

    def __init__(self, limits: RequestLimits, note: Note):
        self._limits = limits
        self._note = note
        self._sources: OrderedDict[str, _Source] = OrderedDict()
        self._minute = 0
        self._noted = 0
        self._unsaid = 0

    async def refused(self, request: web.Request, error: CallError) -> None:
        """Note a refused key, and return when its sender may have the answer."""
        name, now = source_of(request), time.monotonic()
        source = self._sources.get(name)
        if source is None or now - source.seen_at > QUIET_SECONDS:
            source = self._sources[name] = _Source()
        self._sources.move_to_end(name)
        if len(self._sources) > MAX_SOURCES:
            self._sources.popitem(last=False)
        source.refusals, source.seen_at = source.refusals + 1, now
        if source.refusals.bit_count() == 1:
            self._say(f"{name}, {source.refusals} so far: {error}", int(now // 60))
        await asyncio.sleep(wait_seconds(source.refusals - self._limits.free_refusals))

    def _say(self, what: str, minute: int) -> None:
        if minute != self._minute:
            self._minute, self._noted = minute, 0
        if self._noted >= NOTES_PER_MINUTE:
            self._unsaid += 1
            return
        self._noted += 1
        if self._unsaid:
            what, self._unsaid = f"{what} ({self._unsaid} more were not written)", 0
        log.warning("refused a key from %s", what)
        self._note("key_refused", redacted(what))


def wait_seconds(number: int) -> float:
    """How long a refusal waits that is this many above the free ones."""
    return min(MAX_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(16, number - 1)) if number > 0 else 0.0


def source_of(request: web.Request) -> str:
    """Where a request comes from, for logs."""
    return request.remote or "a Unix socket"
