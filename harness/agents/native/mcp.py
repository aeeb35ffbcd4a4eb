"""Tools of MCP servers (Model Context Protocol). How one speaks with them is in connection.py.

Left out: resources, prompts, and what a server asks of its client, except for `ping`.
"""

import time
from collections.abc import Mapping
from itertools import count
from typing import Any

from .connection import CALL_SECONDS, SilentServer, connect
from .settings import ConnectedServer, SettingsError
from .tool import Tool, ToolFailed

PROTOCOL = "2025-06-18"
START_SECONDS = 60.0
NOT_FOUND = -32601
"""JSON-RPC's code for a method that does not exist."""


class Servers:
    """The servers of one rollout, which end with the `with` block."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *_: object) -> None:
        for server in self._servers.values():
            server.end()

    def start(self, wanted: Mapping[str, ConnectedServer]) -> None:
        """Start them and greet them. SettingsError when one does not start."""
        for name, server in wanted.items():
            try:
                self._servers[name] = _Server(server)
                self._servers[name].greet()
            except (SilentServer, OSError, ValueError, KeyError) as error:
                raise SettingsError(f"the MCP server {name} does not start ({error}); correct mcp.{name}") from None

    def tools(self) -> list[Tool]:
        """The tools of all servers, each under its server's name and its own."""
        return [_tool(name, server, found) for name, server in self._servers.items() for found in server.tools]


def _tool(name: str, server: "_Server", found: dict[str, Any]) -> Tool:
    schema = found.get("inputSchema") or {"type": "object", "properties": {}}

    def run(**arguments: Any) -> str:
        return server.call(found["name"], arguments)

    return Tool(f"{name}__{found['name']}", found.get("description") or "", schema, run, checked=False)


class _Server:
    """One server."""

    def __init__(self, server: ConnectedServer):
        self._connection = connect(server)
        self._ids = count(1)
        self.tools: list[dict[str, Any]] = []

    def greet(self) -> None:
        """Shake hands and ask for the tools."""
        me = {"name": "native", "version": "1"}
        hello = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": me}
        self._connection.agree(self._ask("initialize", hello, START_SECONDS).get("protocolVersion", PROTOCOL))
        self._connection.send({"method": "notifications/initialized"})
        cursor: dict[str, Any] = {}
        while True:
            page = self._ask("tools/list", cursor, START_SECONDS)
            self.tools += page["tools"]
            if not page.get("nextCursor"):
                return
            cursor = {"cursor": page["nextCursor"]}

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """The text of a tool's result. ToolFailed when it reports an error, or the server does not answer."""
        try:
            result = self._ask("tools/call", {"name": name, "arguments": arguments}, CALL_SECONDS)
        except (SilentServer, ValueError) as error:
            raise ToolFailed(str(error)) from None
        parts = result.get("content") or []
        text = "\n".join(part["text"] if part.get("type") == "text" else f"[{part.get('type')}]" for part in parts)
        if result.get("isError"):
            raise ToolFailed(text)
        return text

    def end(self) -> None:
        self._connection.end()

    def _ask(self, method: str, params: dict[str, Any], seconds: float) -> dict[str, Any]:
        id = next(self._ids)
        self._connection.send({"id": id, "method": method, "params": params})
        for message in self._connection.messages(time.monotonic() + seconds):
            if "method" in message and "id" in message:
                self._answer(message)
            elif message.get("id") == id and "error" in message:
                raise SilentServer(f"{method} failed: {message['error'].get('message')}")
            elif message.get("id") == id:
                return dict(message["result"])
        raise SilentServer(f"no answer to {method}")

    def _answer(self, message: dict[str, Any]) -> None:
        known = message["method"] == "ping"
        error = {"code": NOT_FOUND, "message": f"{message['method']} is not served"}
        self._connection.send({"id": message["id"], **({"result": {}} if known else {"error": error})})
