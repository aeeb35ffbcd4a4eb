"""Reads request bodies, and bounds their bytes in memory: of each, of each attempt, and of all together.

A body counts for its attempt until the call is answered or, where its client has gone, over; and for all attempts
together until it is rendered: then its bytes are freed. When all together are too many, the attempt that holds most of
them loses a body. Left out: the memory of what is made from a body, which is a few times its size.
"""

import asyncio
import zlib
from collections import Counter
from typing import Any

import brotli
from aiohttp import web
from zstandard import ZstdDecompressor, ZstdError

from proxy.call import CallError
from proxy.http.limits import RequestLimits

ZLIB_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
"""The content encodings that zlib decompresses, with the `wbits` by which it knows their headers."""
ENCODINGS = (*ZLIB_WINDOWS, "br", "zstd")
ZSTD_WINDOW = 1 << 25
"""The most bytes that a zstd body may have its decompressor remember. Clients ask for 8 MiB and less."""
ZSTD_PIECE = 1 << 10
"""Bytes of a zstd body that are decompressed at a time: they become 32 MiB at most."""
BROTLI_PIECE = 1 << 16
"""Bytes of a brotli body that are decompressed at a time, and bytes asked for: up to twice as many come."""


class BodyBytes:
    """Counts the bytes of bodies. It has no lock: only one event loop may use it."""

    def __init__(self, limits: RequestLimits):
        self._limits = limits
        self._unanswered: Counter[int] = Counter()
        """Bytes by attempt."""
        self._unrendered: set[HeldBody] = set()
        """Bodies that count for all together."""
        self._unrendered_bytes = 0

    def held(self, attempt_id: int) -> "HeldBody":
        """Count a body while the block runs, which ends when the client has its answer or has gone."""
        return HeldBody(self, attempt_id)

    def begun(self, body: "HeldBody") -> None:
        """Count a body from now on."""
        self._unrendered.add(body)

    def answered(self, body: "HeldBody") -> None:
        """Count a body no longer."""
        self._unanswered[body.attempt_id] -= body.size
        if not self._unanswered[body.attempt_id]:
            del self._unanswered[body.attempt_id]

    def rendered(self, body: "HeldBody") -> None:
        """Count a body for its attempt only from now on."""
        if body in self._unrendered:
            self._unrendered.remove(body)
            self._unrendered_bytes -= body.size

    def grow(self, body: "HeldBody", count: int) -> None:
        """Count more bytes of a body; CallError when they are too many."""
        attempt, limits = body.attempt_id, self._limits
        body.size += count
        self._unrendered_bytes += count
        self._unanswered[attempt] += count
        if (bytes_ := self._unanswered[attempt]) > limits.attempt_body_bytes:
            rule = f"the bodies of this key's unanswered calls have {bytes_} bytes, and at most"
            raise _busy(429, f"{rule} {limits.attempt_body_bytes} are served; wait for answers, then try again")
        while self._unrendered_bytes > limits.all_body_bytes:
            self._break_one_off(body)

    def _break_one_off(self, growing: "HeldBody") -> None:
        """Break off a body of the attempt that holds most; CallError when it is the growing one, or none is left."""
        by_attempt: Counter[int] = Counter()
        for body in self._unrendered:
            by_attempt[body.attempt_id] += body.size
        [(largest, _)] = by_attempt.most_common(1)
        arriving = [body for body in self._unrendered if body.attempt_id == largest and body.deadline is not None]
        loses = max(arriving, key=lambda body: body.size, default=growing)
        if largest == growing.attempt_id or loses is growing:
            raise self.too_many()
        self.rendered(loses)
        loses.break_off()

    def too_many(self) -> CallError:
        """The error for a body that was broken off."""
        rule = f"over {self._limits.all_body_bytes} bytes of bodies arrive at once, and this key sends most of them"
        return _busy(503, f"{rule}; try again in 1s")


class HeldBody:
    """One body that is being received, and then waits for its answer."""

    def __init__(self, ledger: BodyBytes, attempt_id: int):
        self._ledger = ledger
        self.attempt_id = attempt_id
        self.size = 0
        self.deadline: asyncio.Timeout | None = None
        """Set while it arrives: what ends its reading."""
        self.broken_off = False
        self._users = 1

    def __enter__(self) -> "HeldBody":
        self._ledger.begun(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.rendered()
        self.release()

    def keep_until(self, end: "asyncio.Future[Any]") -> None:
        """Count the body until then, even if its client goes away."""
        self._users += 1
        end.add_done_callback(lambda _: self.release())

    def release(self) -> None:
        """Count the body no longer when this was its last user."""
        self._users -= 1
        if not self._users:
            self._ledger.answered(self)

    def grow(self, count: int) -> None:
        """Count more bytes; CallError when they are too many."""
        if self.broken_off:
            raise self.too_many()
        self._ledger.grow(self, count)

    def rendered(self) -> None:
        """Count the body for its attempt only from now on."""
        self._ledger.rendered(self)

    def break_off(self) -> None:
        """End its reading, so that it fails with `too_many`."""
        assert self.deadline is not None
        self.broken_off = True
        self.deadline.reschedule(asyncio.get_running_loop().time())

    def too_many(self) -> CallError:
        """The error for a body that was broken off."""
        return self._ledger.too_many()


def _busy(status: int, message: str) -> CallError:
    return CallError(status, "too_many_bytes", message)


async def read_body(request: web.Request, limits: RequestLimits, held_body: HeldBody) -> bytes:
    """Read the request's body and decompress it; CallError (400, 408, 413, 415, 429, 503) says what is wrong or too
    much."""
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("identity", *ENCODINGS):
        rule = f"the body is encoded as {encoding!r}, which is not served; use {', '.join(ENCODINGS)} or no encoding"
        raise CallError(415, "unsupported_encoding", rule)
    too_large = CallError(413, "request_too_large", f"the body is larger than {limits.body_bytes} bytes; send less")
    if (request.content_length or 0) > limits.body_bytes:
        raise too_large
    try:
        async with asyncio.timeout(limits.body_seconds) as held_body.deadline:
            body = await _arrived(request, held_body, too_large, limits.body_bytes)
    except TimeoutError as error:
        if held_body.broken_off:
            raise held_body.too_many() from error
        rule = f"the body did not arrive within {limits.body_seconds:g} s; send it at once"
        raise CallError(408, "request_timeout", rule) from error
    except web.RequestPayloadError as error:
        raise CallError(400, "invalid_request", "the body does not match its headers; send it whole") from error
    finally:
        held_body.deadline = None
    if encoding in ENCODINGS:
        inflated = await asyncio.to_thread(_inflated, body, encoding, limits.body_bytes)
        held_body.grow(len(inflated) - len(body))
        body = inflated
    if len(body) > limits.body_bytes:
        raise too_large
    return body


async def _arrived(request: web.Request, held_body: HeldBody, too_large: CallError, limit: int) -> bytes:
    """All bytes of the body, counted as they come."""
    body = bytearray()
    while part := await request.content.readany():
        held_body.grow(len(part))
        body += part
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """Decompress to at most one byte more than the limit, so that a small body cannot fill the memory."""
    try:
        if encoding in ZLIB_WINDOWS:
            inflated, whole = _unzlib(body, ZLIB_WINDOWS[encoding], limit)
        else:
            inflated, whole = (_unzstd if encoding == "zstd" else _unbrotli)(body, limit)
    except (zlib.error, brotli.error, ZstdError) as error:
        raise CallError(
            400, "invalid_request", f"the body is not valid {encoding} ({error}); send it uncompressed"
        ) from error
    if not whole and len(inflated) <= limit:
        raise CallError(400, "invalid_request", f"the body's {encoding} data breaks off; send all of it")
    return inflated


def _unzlib(body: bytes, window: int, limit: int) -> tuple[bytes, bool]:
    inflater = zlib.decompressobj(window)
    return inflater.decompress(body, limit + 1), inflater.eof


def _unbrotli(body: bytes, limit: int) -> tuple[bytes, bool]:
    inflater, inflated = brotli.Decompressor(), bytearray()
    for at in range(0, len(body), BROTLI_PIECE):
        inflated += inflater.process(body[at : at + BROTLI_PIECE], output_buffer_limit=BROTLI_PIECE)
        while len(inflated) <= limit and not inflater.can_accept_more_data():
            inflated += inflater.process(b"", output_buffer_limit=BROTLI_PIECE)
        if len(inflated) > limit:
            break
    return bytes(inflated[: limit + 1]), inflater.is_finished()


def _unzstd(body: bytes, limit: int) -> tuple[bytes, bool]:
    inflater, inflated = ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj(), bytearray()
    for at in range(0, len(body), ZSTD_PIECE):
        inflated += inflater.decompress(body[at : at + ZSTD_PIECE])
        if inflater.eof or len(inflated) > limit:
            break
    return bytes(inflated[: limit + 1]), inflater.eof
