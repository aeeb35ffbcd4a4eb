"""A relay before the proxy that notes each answer which has wholly come through: `... TARGET DIRECTORY`.

What stands in DIRECTORY/notes was acknowledged: the pool must hold it, whatever was killed. The relay itself is never
killed. Containers reach it by DIRECTORY/seen/relay.sock, which it names instead of the proxy's own/proxy.sock.
"""

import asyncio
import sys
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

CALLS = "/v1/chat/completions"
HOP = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}
"""Headers of one connection only."""


async def serve(target: str, directory: Path) -> None:
    """Relay until the process is ended."""
    unlimited = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=unlimited, timeout=aiohttp.ClientTimeout(total=None)) as client:

        async def relay(request: web.Request) -> web.Response:
            headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
            try:
                body = await request.read()
                async with client.request(
                    request.method, target + request.path_qs, data=body, headers=headers
                ) as answer:
                    content = await answer.read()
            except aiohttp.ClientError as error:  # the proxy was killed: its client sees a broken connection too
                assert request.transport is not None
                request.transport.abort()
                raise web.HTTPBadGateway from error
            if request.path == CALLS and answer.status == 200:
                note = {
                    "key": request.headers["Authorization"].removeprefix("Bearer "),
                    "content": msgspec.json.decode(content)["choices"][0]["message"]["content"],
                }
                with (directory / "notes").open("ab") as file:
                    file.write(msgspec.json.encode(note) + b"\n")
            if request.path == "/health":
                content = content.replace(b"/own/proxy.sock", b"/seen/relay.sock")
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
            return web.Response(status=answer.status, body=content, headers=kept)

        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", relay)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        (directory / "seen").mkdir(mode=0o711)
        await web.UnixSite(runner, str(directory / "seen/relay.sock")).start()
        (directory / "seen/relay.sock").chmod(0o666)  # the user inside a container is another one
        address = msgspec.json.encode({"url": f"http://127.0.0.1:{runner.addresses[0][1]}"})
        (directory / "relay.ready").write_bytes(address)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], Path(sys.argv[2])))
