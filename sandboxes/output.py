"""Bounded output of a command: the first and the last half of the limit are kept, what lies between is counted."""

import os
from collections import deque

from sandboxes.base import OnOutput


class BoundedOutput:
    """What is kept of an output. `add` is given all of it."""

    def __init__(self, limit: int, on_output: OnOutput | None = None):
        self._on_output = on_output
        self._half = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.dropped = 0

    def add(self, chunk: bytes) -> None:
        """Pass a piece on, and keep what the limit allows."""
        if self._on_output is not None and chunk:
            self._on_output(chunk)
        self._keep(chunk)

    def text(self) -> str:
        """What was kept, with a line where something was dropped."""
        gap = f"\n[{self.dropped} bytes dropped]\n".encode() if self.dropped else b""
        return (bytes(self._head) + gap + b"".join(self._tail)).decode(errors="replace")

    def _keep(self, chunk: bytes) -> None:
        room = self._half - len(self._head)
        self._head += chunk[:room]
        rest = chunk[room:] if room < len(chunk) else b""
        if rest:
            self._tail.append(rest)
            self._tail_bytes += len(rest)
        while self._tail_bytes > self._half:
            excess = self._tail_bytes - self._half
            first = self._tail.popleft()
            gone = min(excess, len(first))
            if gone < len(first):
                self._tail.appendleft(first[gone:])
            self._tail_bytes -= gone
            self.dropped += gone


class OutputPipe(BoundedOutput):
    """The reading end of a pipe. Everything is read, so that the writer never blocks; not everything is kept."""

    def __init__(self, limit: int, on_output: OnOutput | None = None):
        super().__init__(limit, on_output)
        self.reader, self.writer = os.pipe()
        self._writing = True
        os.set_blocking(self.reader, False)

    def read_available(self) -> bool:
        """Read what is there. False at the end, when nobody can write any more."""
        for _ in range(64):  # a flood must not keep the event loop here
            try:
                chunk = os.read(self.reader, 1 << 16)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            self.add(chunk)
        return True

    def close_writer(self) -> None:
        """Let go of our own writing end, once the command has it."""
        if self._writing:
            os.close(self.writer)
            self._writing = False

    def close(self) -> None:
        """Take what is left without waiting for writers that live on, and close the pipe."""
        self.close_writer()
        self.read_available()
        os.close(self.reader)
