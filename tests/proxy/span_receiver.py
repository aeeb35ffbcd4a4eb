"""Run in OpenTelemetry's environment: receives the spans of `proxy pool export`, which it starts, and prints them.

Arguments: the HTTP status of its answers, then those of `proxy pool export` without --endpoint.
"""

import json
import sys
from asyncio import new_event_loop, run_coroutine_threadsafe
from threading import Thread
from typing import Any

from aiohttp import web
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from proxy.commands.main import main


def receiver(status: int, received: list[bytes]) -> web.Application:
    """The traces route of an OTLP/HTTP receiver."""

    async def take(request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        received.append(await request.read())
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, status=status, content_type="application/x-protobuf")

    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/traces", take)
    return app


async def started(app: web.Application) -> str:
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1/traces"  # type: ignore[attr-defined]


def shown(span: dict[str, Any]) -> dict[str, Any]:
    """A span with its attributes as a dictionary of JSON values."""

    def value(of: dict[str, Any]) -> Any:
        if "arrayValue" in of:
            return [value(each) for each in of["arrayValue"].get("values", [])]
        return next(iter(of.values()))

    return span | {"attributes": {each["key"]: value(each["value"]) for each in span.get("attributes", [])}}


if __name__ == "__main__":
    loop, received = new_event_loop(), list[bytes]()
    Thread(target=loop.run_forever, daemon=True).start()
    url = run_coroutine_threadsafe(started(receiver(int(sys.argv[1]), received)), loop).result()
    code = main([*sys.argv[2:], "--endpoint", url])
    requests = [MessageToDict(ExportTraceServiceRequest.FromString(each)) for each in received]
    scopes = [scope for each in requests for place in each["resourceSpans"] for scope in place["scopeSpans"]]
    print(json.dumps([shown(span) for scope in scopes for span in scope["spans"]]))
    sys.exit(code)
