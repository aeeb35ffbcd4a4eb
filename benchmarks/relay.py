"""The least that an aiohttp proxy can do: forward a request and its answer, bytes as they come.

Measured beside the gateway: its cost is that of aiohttp on the gateway's event loop.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import aiohttp
import uvloop
from aiohttp import web

TARGET = web.AppKey("target", str)
CLIENT = web.AppKey("client", aiohttp.ClientSession)


async def relay(request: web.Request) -> web.StreamResponse:
    """Forward one request to the target, and its answer back."""
    body, headers = await request.read(), {"Content-Type": "application/json"}
    async with request.app[CLIENT].post(request.app[TARGET] + request.path, data=body, headers=headers) as answer:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
    return response


async def _client(app: web.Application) -> AsyncIterator[None]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as app[CLIENT]:
        yield


async def serve(target: str) -> None:
    """Serve on a free port, which is printed, until the process is ended."""
    app = web.Application(client_max_size=1 << 28)
    app[TARGET] = target
    app.cleanup_ctx.append(_client)
    app.router.add_post("/{path:.*}", relay)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"ready: http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve(sys.argv[1]))
