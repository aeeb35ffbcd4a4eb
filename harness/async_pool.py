"""The pool from the event loop: each query runs in a thread, so that a database that is slow stalls no other attempt.

A query that has begun is waited for, also when its caller is cancelled: what it wrote is then known to be written.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Concatenate, ParamSpec, TypeVar

from proxy.pool.database import Pool

P = ParamSpec("P")
T = TypeVar("T")
THREADS = 4


class AsyncPool:
    """A pool's functions, awaited."""

    def __init__(self, pool: Pool):
        self.blocking = pool
        self._threads = ThreadPoolExecutor(THREADS, "pool")

    async def __call__(self, query: Callable[Concatenate[Pool, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of the pool."""
        work = partial(query, self.blocking, *args, **kwargs)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise
