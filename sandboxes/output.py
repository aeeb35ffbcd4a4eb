"""Bounded output of a command: keeps the first and the last half of the limit and counts the bytes between."""

import os
from collections import deque

from sandboxes.base import OnOutput


class BoundedOutput:
    """Keeps the beginning and the end of an output. Pass every piece to `add`."""

    def __init__(self, limit: int, on_output: OnOutput | None = None):
        self._on_output = on_output
        self._half = limit // 2
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.dropped = 0

    def add(self, chunk: bytes) -> None:
        """Pass a piece on to `on_output`, and keep what the limit allows."""
        if self._on_output is not None and chunk:
            self._on_output(chunk)
        self._keep(chunk)

    def text(self, cut: bool = False) -> str:
        """Return what was kept, with a line where bytes were dropped, and one at the end if that was lost (`cut`)."""
        gap = f"\n[{self.dropped} bytes dropped]\n".encode() if self.dropped else b""
        end = b"\n[the end of this output was lost]\n" if cut else b""
        return (bytes(self._head) + gap + b"".join(self._tail) + end).decode(errors="replace")

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
    """The reading end of a pipe. Reads everything, so that the writer never blocks, and keeps what the limit allows."""

    def __init__(self, limit: int, on_output: OnOutput | None = None):
        super().__init__(limit, on_output)
        self.reader, self.writer = os.pipe()
        self._writing = True
        os.set_blocking(self.reader, False)

    def read_available(self) -> bool:
        """Read what is available. Return False at the end, when nobody can write any more."""
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
        """Close our own writing end, once the command has inherited it."""
        if self._writing:
            os.close(self.writer)
            self._writing = False

    def close(self) -> None:
        """Read what is left, without waiting for writers that are still alive, and close the pipe."""
        self.close_writer()
        self.read_available()
        os.close(self.reader)
