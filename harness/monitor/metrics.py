"""What goes on in a run's sandboxes, for Prometheus: RUN_DIR/metrics.prom, and `harness run --metrics-port N`.

The file is for the node exporter's textfile collector and is replaced every few seconds. The port is on this machine's
loopback, at /metrics. What the proxy counts is at its own /metrics. Left out: sandboxes on the nodes of a Ray cluster.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from proxy.pool.errors import UserError
from proxy.pool.files import write_whole

METRICS = "metrics.prom"
WRITE_SECONDS = 5.0


@asynccontextmanager
async def shown(text: Callable[[], str], port: int | None, file: Path) -> AsyncIterator[None]:
    """Write the metrics to the file, and serve them on the port, until the block ends. UserError if the port is taken.

    A file that cannot be written is left out: a full disk must not end a run for its metrics.
    """
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(_written(text, file))
        if port is not None:
            await stack.enter_async_context(_served(text, port))
        yield


@asynccontextmanager
async def _served(text: Callable[[], str], port: int) -> AsyncIterator[None]:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=text(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
    except OSError as error:
        await runner.cleanup()
        raise UserError(f"port {port} cannot be used for metrics ({error.strerror}); choose another") from error
    try:
        yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def _written(text: Callable[[], str], file: Path) -> AsyncIterator[None]:
    def write(content: bytes) -> None:
        with suppress(OSError):
            write_whole(file, content)

    async def keep_writing() -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await asyncio.to_thread(write, text().encode())

    write(text().encode())
    writing = asyncio.create_task(keep_writing())
    try:
        yield
    finally:
        writing.cancel()
        await asyncio.wait([writing])
        write(text().encode())
