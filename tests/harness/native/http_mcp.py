"""An MCP server over HTTP in the test's process: it answers as JSON and as a stream, and asks its client back."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PROTOCOL = "2025-03-26"
"""Older than the client's, so that it must speak as it is told."""
TOOL = {"name": "join", "description": "joins", "inputSchema": {"type": "object", "properties": {"text": {}}}}


@dataclass
class HttpServer:
    """What it was asked."""

    url: str = ""
    headers: list[dict[str, str]] = field(default_factory=list)
    answers: "asyncio.Queue[dict[str, Any]]" = field(default_factory=asyncio.Queue)
    """What clients answered to its questions."""
    ended: list[str] = field(default_factory=list)

    async def post(self, request: web.Request) -> web.StreamResponse:
        message = await request.json()
        self.headers.append(dict(request.headers))
        if "method" not in message:
            await self.answers.put(message)
        if "id" not in message or "method" not in message:
            return web.Response(status=202)
        if message["method"] == "initialize":
            result = {"protocolVersion": PROTOCOL, "capabilities": {}, "serverInfo": {"name": "words", "version": "1"}}
            return self._whole(message, result, {"Mcp-Session-Id": "s1"})
        if message["method"] == "tools/list":
            return self._whole(message, {"tools": [TOOL]}, {})
        if message["params"]["arguments"]["text"] == "lost":
            return web.Response(status=404, text="no such session")
        stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await stream.prepare(request)
        await stream.write(b": a comment\n\n" + _event({"id": "s1", "method": "ping"}))
        pong = await asyncio.wait_for(self.answers.get(), 10)
        if message["params"]["arguments"]["text"] == "broken":
            return stream
        await stream.write(_event({"method": "notifications/message", "params": {"level": "info", "data": "working"}}))
        text = f"{message['params']['arguments']['text']} quince {pong['result']}"
        await stream.write(_event({"id": message["id"], "result": {"content": [{"type": "text", "text": text}]}}))
        return stream

    def _whole(self, message: dict[str, Any], result: dict[str, Any], headers: dict[str, str]) -> web.Response:
        return web.json_response({"jsonrpc": "2.0", "id": message["id"], "result": result}, headers=headers)

    async def delete(self, request: web.Request) -> web.Response:
        self.ended.append(request.headers["Mcp-Session-Id"])
        return web.Response()


def _event(message: dict[str, Any]) -> bytes:
    """A message as an event whose data stands in two lines."""
    first, rest = json.dumps({"jsonrpc": "2.0", **message}).split(", ", 1)
    return f"event: message\r\ndata: {first},\r\ndata: {rest}\r\n\r\n".encode()


@asynccontextmanager
async def http_server() -> AsyncIterator[HttpServer]:
    """Serve on a free port while the block lasts."""
    server, app = HttpServer(), web.Application()
    app.router.add_post("/mcp", server.post)
    app.router.add_delete("/mcp", server.delete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}/mcp"
    try:
        yield server
    finally:
        await runner.cleanup()
