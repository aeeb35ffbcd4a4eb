"""Completions that several processes commit to one PostgreSQL at the same time, as proxies do."""

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from benchmarks.pool import completion
from proxy.pool.completions.store import CompletionWriter
from proxy.pool.database import open_pool
from proxy.pool.rollouts.attempts import open_session

CALLERS = 32
"""Calls of one process that wait for a commit at the same time."""
TOKENS = 332
"""Of a prompt's new part, and of an answer: together as many as a call adds in the gateway's benchmark."""


def write(url: str, number: int, count: int) -> tuple[float, float]:
    """Commit completions from one process; return the times of the first and of the last commit."""
    return asyncio.run(_write(url, number, count))


async def _write(url: str, number: int, count: int) -> tuple[float, float]:
    pool = open_pool(url)
    attempts = [open_session(pool, f"writer {number} {caller}").id for caller in range(CALLERS)]
    writer = CompletionWriter(pool)

    async def agent(attempt_id: int, calls: int) -> None:
        for _ in range(calls):
            await writer.add(completion(attempt_id, TOKENS))

    await asyncio.gather(*(agent(attempt_id, 2) for attempt_id in attempts))  # the first ones build statements
    began = time.time()
    await asyncio.gather(*(agent(attempt_id, count // CALLERS) for attempt_id in attempts))
    ended = time.time()
    await writer.close()
    pool.close()
    return began, ended


def commit_rates(url: str, processes: Sequence[int], count: int) -> dict[int, float]:
    """Return, by the number of processes, the completions per second that they commit together."""
    rates = {}
    for number in processes:
        with ProcessPoolExecutor(number, mp_context=get_context("spawn")) as executor:
            jobs = [executor.submit(write, url, 100 * number + writer, count) for writer in range(number)]
            times = [job.result() for job in jobs]
        seconds = max(ended for _, ended in times) - min(began for began, _ in times)
        rates[number] = number * (count // CALLERS) * CALLERS / seconds
    return rates
