"""The gateway benchmark's engine: SGLang's `/generate` with precomputed bytes, so that it costs almost nothing.

`POST /mode` sets the kind of answer, how long a call takes and the time between the events of a stream. A call is
identified by its `max_new_tokens`, which is all that the engine reads of a request; `GET /times` returns when each call
was received and answered. For litellm, it also answers chat completions with fixed bytes. Left out: everything else.
"""

import asyncio
import random
import re
import sys
import time
from pathlib import Path

import msgspec

from benchmarks.answers import Answers

NAME = re.compile(rb'"max_new_tokens":\s*(\d+)')
LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)


class AnswerMode(msgspec.Struct):
    """How calls are answered from now on."""

    kind: str
    seconds: float = 0.0
    """Mean time until an answer that is not streamed; single answers take 0.5 to 1.5 times as long."""
    pace: float = 0.0
    """Seconds between the events of a stream; 0 sends them as fast as possible."""


class CallTimes(msgspec.Struct):
    """When one call was received, and its first and last byte were sent; monotonic seconds."""

    received: float
    first: float = 0.0
    last: float = 0.0


class EngineScript(msgspec.Struct):
    """What the engine reads at its start."""

    answers: dict[str, Answers]
    chat: bytes


class PrecomputedEngine:
    """The state that all connections share."""

    def __init__(self, script: EngineScript):
        self.chat = script.chat
        self.mode = AnswerMode(next(iter(script.answers)))
        self.times: dict[int, CallTimes] = {}
        self.calls = 0
        self._answers = script.answers

    def whole(self) -> bytes:
        """The next answer in one piece."""
        self.calls += 1
        answers = self._answers[self.mode.kind].whole
        return answers[self.calls % len(answers)]

    def events(self) -> list[bytes]:
        """The next answer as events."""
        self.calls += 1
        answers = self._answers[self.mode.kind].streams
        return answers[self.calls % len(answers)]


class Connection(asyncio.Protocol):
    """One keep-alive connection. Requests on it come one after the other."""

    def __init__(self, engine: PrecomputedEngine):
        self._engine = engine
        self._data = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, _error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return
        length = LENGTH.search(self._data, 0, end)
        size = end + 4 + (int(length[1]) if length else 0)
        if len(self._data) >= size:
            line, body = bytes(self._data[: self._data.index(b"\r\n")]), bytes(self._data[end + 4 : size])
            del self._data[:size]
            self._serve(line.split(b" ")[1].decode(), body)

    def _serve(self, path: str, body: bytes) -> None:
        engine = self._engine
        if path == "/generate":
            self._generate(body)
        elif path == "/mode":
            engine.mode = msgspec.json.decode(body, type=AnswerMode)
            self._answer(b"{}")
        elif path == "/times":
            times, engine.times = engine.times, {}
            self._answer(msgspec.json.encode(times))
        else:
            self._answer(engine.chat if path.endswith("/chat/completions") else b"{}")

    def _generate(self, body: bytes) -> None:
        name = NAME.search(body, max(0, body.rfind(b'"max_new_tokens"')))
        assert name is not None, "the request names no max_new_tokens"
        times = self._engine.times[int(name[1])] = CallTimes(time.monotonic())
        loop, mode = asyncio.get_running_loop(), self._engine.mode
        if b'"stream":true' in body or b'"stream": true' in body:
            head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            self._transport.write(head + b"Transfer-Encoding: chunked\r\n\r\n")
            self._timer = loop.call_later(mode.pace, self._send, self._engine.events(), 0, times)
        else:
            seconds = mode.seconds * random.uniform(0.5, 1.5)
            self._timer = loop.call_later(seconds, self._whole, self._engine.whole(), times)

    def _whole(self, answer: bytes, times: CallTimes) -> None:
        times.first = times.last = time.monotonic()
        self._answer(answer)

    def _send(self, events: list[bytes], at: int, times: CallTimes) -> None:
        """Write one event, and schedule the next one or the end."""
        times.last = time.monotonic()
        times.first = times.first or times.last
        if at == len(events):
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            return
        self._transport.write(b"%x\r\n%b\r\n" % (len(events[at]), events[at]))
        pace = self._engine.mode.pace if at + 1 < len(events) else 0
        self._timer = asyncio.get_running_loop().call_later(pace, self._send, events, at + 1, times)

    def _answer(self, body: bytes) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        self._transport.write(head % len(body) + body)


async def serve(script: Path) -> None:
    """Serve on a free port, which is printed, until the process is ended."""
    engine = PrecomputedEngine(msgspec.msgpack.decode(script.read_bytes(), type=EngineScript))
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", 0)
    print(f"ready: http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
