"""Runs the pool's functions in threads, so that a slow database does not stall the event loop and other attempts."""

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
    """Awaitable access to a pool: `await async_pool(function, argument)` calls `function(pool, argument)`."""

    def __init__(self, pool: Pool):
        self.blocking = pool
        self._threads = ThreadPoolExecutor(THREADS, "pool")

    async def __call__(self, query: Callable[Concatenate[Pool, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function of the pool in a thread and return its result.

        A cancelled caller waits until the call has ended, so that it is certain what was written.
        """
        work = partial(query, self.blocking, *args, **kwargs)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            await asyncio.wait([running])
            raise
