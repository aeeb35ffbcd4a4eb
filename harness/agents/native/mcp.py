"""Tools of MCP servers (Model Context Protocol) that speak JSON lines over their standard input and output.

Left out: servers over HTTP, resources, prompts, and what a server asks of its client, except for `ping`.
"""

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from .settings import ConnectedServer, SettingsError
from .tool import Tool, ToolFailed

PROTOCOL = "2025-06-18"
START_SECONDS = 60.0
CALL_SECONDS = 600.0
NOT_FOUND = -32601
"""JSON-RPC's code for a method that does not exist."""


class _Silent(Exception):
    """A server does not answer; the message says why."""


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
            except (_Silent, OSError, ValueError, KeyError) as error:
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
    """One server as a child process. It writes its log to our standard error."""

    def __init__(self, server: ConnectedServer):
        self._process = subprocess.Popen(
            list(server.command), env=os.environ | server.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._ids, self._buffer = count(1), b""
        self.tools: list[dict[str, Any]] = []

    def greet(self) -> None:
        """Shake hands and ask for the tools."""
        me = {"name": "native", "version": "1"}
        hello = {"protocolVersion": PROTOCOL, "capabilities": {}, "clientInfo": me}
        self._ask("initialize", hello, START_SECONDS)
        self._send({"method": "notifications/initialized"})
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
        except (_Silent, ValueError) as error:
            raise ToolFailed(str(error)) from None
        parts = result.get("content") or []
        text = "\n".join(part["text"] if part.get("type") == "text" else f"[{part.get('type')}]" for part in parts)
        if result.get("isError"):
            raise ToolFailed(text)
        return text

    def _ask(self, method: str, params: dict[str, Any], seconds: float) -> dict[str, Any]:
        id = next(self._ids)
        self._send({"id": id, "method": method, "params": params})
        for message in self._messages(time.monotonic() + seconds):
            if "method" in message and "id" in message:
                self._answer(message)
            elif message.get("id") == id and "error" in message:
                raise _Silent(f"{method} failed: {message['error'].get('message')}")
            elif message.get("id") == id:
                return dict(message["result"])
        raise _Silent(f"no answer to {method}")

    def _answer(self, message: dict[str, Any]) -> None:
        known = message["method"] == "ping"
        error = {"code": NOT_FOUND, "message": f"{message['method']} is not served"}
        self._send({"id": message["id"], **({"result": {}} if known else {"error": error})})

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise _Silent("the server has ended") from None

    def _messages(self, deadline: float) -> Iterator[dict[str, Any]]:
        """What the server says until the deadline, or until it ends."""
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        while True:
            line, end, rest = self._buffer.partition(b"\n")
            if end:
                self._buffer = rest
                message = json.loads(line)
                if isinstance(message, dict):
                    yield message
                continue
            if not select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return
            data = os.read(file, 65536)
            if not data:
                return
            self._buffer += data

    def end(self) -> None:
        """Close its input, which asks it to end, and kill it when it does not."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended already
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
