"""The undelivered answers of one attempt, as far as this proxy knows them. The pool decides who gets one."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from proxy.pool.processes.deliveries import UndeliveredAnswer


@dataclass
class WaitingAnswers:
    """Answers that wait for a retry, and those that are being committed for a client that has gone.

    Not locked: use it from the event loop only.
    """

    by_id: dict[int, UndeliveredAnswer] = field(default_factory=dict)
    _being_stored: dict[bytes, set[asyncio.Event]] = field(default_factory=dict)

    def add(self, answers: list[UndeliveredAnswer]) -> None:
        self.by_id |= {answer.completion_id: answer for answer in answers}

    @contextmanager
    def storing(self, fingerprint: bytes) -> Iterator[None]:
        """Make retries of this request wait while the block stores an answer whose client has gone."""
        stored = asyncio.Event()
        self._being_stored.setdefault(fingerprint, set()).add(stored)
        try:
            yield
        finally:
            stored.set()
            self._being_stored[fingerprint].discard(stored)
            if not self._being_stored[fingerprint]:
                del self._being_stored[fingerprint]

    async def wait_until_stored(self, fingerprint: bytes) -> None:
        """Return when no answer to this request is being stored for a client that has gone."""
        for stored in list(self._being_stored.get(fingerprint, ())):
            await stored.wait()

    def candidates(self, fingerprint: bytes, limit: int) -> list[int]:
        """The answers to this request that sampling at most `limit` tokens could have given, by completion id."""
        return [
            answer.completion_id
            for answer in self.by_id.values()
            if answer.fingerprint == fingerprint
            and answer.sampled <= limit
            and (not answer.cut or answer.sampled == limit)
        ]
