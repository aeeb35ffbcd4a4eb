"""The two ways to speak with an MCP server: a program's standard input and output, and POSTs to an address.

Left out: the stream that a server over HTTP may open by itself, and going on with a stream that broke off.
"""

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Protocol
from urllib.parse import urlsplit

from .settings import ConnectedServer

SEND_SECONDS = 60.0
"""For a server over HTTP to begin its answer to what is no call."""
CALL_SECONDS = 600.0
END_SECONDS = 2.0
Message = dict[str, Any]


class SilentServer(Exception):
    """A server does not answer; the message says why."""


class ServerConnection(Protocol):
    """One connection to a server."""

    def agree(self, protocol: str) -> None:
        """Note the version of the protocol that the server has chosen."""

    def send(self, message: Message) -> None:
        """Send a message of JSON-RPC, without its `jsonrpc`. SilentServer when it cannot be sent."""

    def messages(self, deadline: float) -> Iterator[Message]:
        """What the server says until the deadline on the monotonic clock, or until it says no more."""

    def end(self) -> None: ...


def connect(server: ConnectedServer) -> ServerConnection:
    """Start a program, or prepare to speak to an address. OSError when the program cannot be started."""
    return WebConnection(server.url) if server.url else ProgramConnection(server)


class ProgramConnection:
    """A child process that reads and writes JSON lines. It writes its log to our standard error."""

    def __init__(self, server: ConnectedServer):
        self._process = subprocess.Popen(
            list(server.command), env=os.environ | server.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._buffer = b""

    def agree(self, protocol: str) -> None:
        """Only a server over HTTP must be told."""

    def send(self, message: Message) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(_encoded(message) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SilentServer("the server has ended") from None

    def messages(self, deadline: float) -> Iterator[Message]:
        assert self._process.stdout is not None
        file = self._process.stdout.fileno()
        while True:
            line, end, rest = self._buffer.partition(b"\n")
            if end:
                self._buffer = rest
                yield from _decoded(line)
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
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


class WebConnection:
    """A server over "streamable HTTP": each message is a POST; the answer to a request holds what the server says."""

    def __init__(self, url: str):
        parts = urlsplit(url)
        self._kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._host, self._port = parts.hostname or "", parts.port
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        self._open: tuple[HTTPConnection, HTTPResponse] | None = None

    def agree(self, protocol: str) -> None:
        self._headers["MCP-Protocol-Version"] = protocol

    def send(self, message: Message) -> None:
        asks = "method" in message and "id" in message
        try:
            connection, answer = self._exchange("POST", _encoded(message), CALL_SECONDS if asks else SEND_SECONDS)
            if answer.status // 100 != 2:
                text = answer.read(300).decode(errors="replace")
                connection.close()
                raise SilentServer(f"the server answers with HTTP {answer.status}: {text}")
        except (HTTPException, OSError) as error:
            raise SilentServer(f"the server does not answer ({type(error).__name__}: {error})") from None
        self._headers |= {name: value for name, value in answer.getheaders() if name.lower() == "mcp-session-id"}
        if asks:  # what we answer in the middle of a request does not end what the server says to it
            self._close()
            self._open = connection, answer
        else:
            connection.close()

    def messages(self, deadline: float) -> Iterator[Message]:
        if self._open is None:
            return
        connection, answer = self._open
        try:
            if answer.headers.get_content_type() != "text/event-stream":
                yield from _decoded(answer.read())
                return
            lines: list[bytes] = []
            while line := _line(connection, answer, deadline):
                if line.startswith(b"data:"):
                    lines.append(line[5:].strip())
                elif not line.strip() and lines:
                    yield from _decoded(b"\n".join(lines))
                    lines = []
        except (HTTPException, OSError):
            return  # it broke off, or took too long
        finally:
            self._close()

    def end(self) -> None:
        """Tell the server that its session is over; it need not care."""
        self._close()
        try:
            self._exchange("DELETE", b"", END_SECONDS)[0].close()
        except (HTTPException, OSError):
            pass

    def _exchange(self, method: str, body: bytes, seconds: float) -> tuple[HTTPConnection, HTTPResponse]:
        connection = self._kind(self._host, self._port, timeout=seconds)
        try:
            connection.request(method, self._path, body, self._headers)
            return connection, connection.getresponse()
        except (HTTPException, OSError):
            connection.close()
            raise

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open[0].close()
            self._open = None


def _line(connection: HTTPConnection, answer: HTTPResponse, deadline: float) -> bytes:
    """The next line of a stream; TimeoutError at the deadline."""
    if connection.sock is not None:  # none where the server said that it will close
        connection.sock.settimeout(max(0.01, deadline - time.monotonic()))
    return answer.readline()


def _encoded(message: Message) -> bytes:
    return json.dumps({"jsonrpc": "2.0", **message}).encode()


def _decoded(text: bytes) -> Iterator[Message]:
    """The message of a text, if it is an object. ValueError when it is no JSON."""
    message = json.loads(text)
    if isinstance(message, dict):
        yield message
