"""Passes connections on between a TCP address and a Unix socket, in either direction. A sandbox's only connection.

A program of its own, `python -I -S relay.py LISTEN TARGET` with tcp:HOST:PORT or unix:PATH for each, that runs under
any Python from 3.9 on, inside of sandboxes and in relay containers. It prints `ready` once it listens; with `check` as
a third argument it exits with a sentence when the target cannot be reached at the start. Each half of a connection ends
by itself; a broken half ends both, and so does the target's end after some seconds, as nobody hears the caller then. It
does not look at the bytes, so the target decides what is allowed.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress

CHUNK = 1 << 16
BACKLOG = 1024
GRACE_SECONDS = 5.0
UNREAD_SECONDS = 120.0  # the proxy gives up after 60, which a relay that waits for the caller does not see
MAX_CONNECTIONS = 4096
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def serve(listen: str, target: str, ready: Callable[[], object]) -> None:
    """Pass connections on until cancelled. Those above MAX_CONNECTIONS at a time are ended at once."""
    passing: set[asyncio.StreamWriter] = set()

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(passing) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        passing.add(writer)
        try:
            await joined((reader, writer), await connected(target))
        except OSError:  # the caller sees a connection that ends, and may try again
            writer.transport.abort()
        finally:
            passing.remove(writer)

    kind, where = parsed(listen)
    if kind == "unix":
        with suppress(FileNotFoundError):
            os.unlink(where)  # left by a relay that was killed
        server = await asyncio.start_unix_server(passed_on, where, backlog=BACKLOG)
        os.chmod(where, 0o666)  # users inside sandboxes are not the owner
    else:
        host, _, port = where.rpartition(":")
        server = await asyncio.start_server(passed_on, host, int(port), backlog=BACKLOG)
    async with server:
        ready()
        await server.serve_forever()


async def joined(caller: Streams, target: Streams) -> None:
    """Pass bytes on in both directions until both have ended, or the target's has for some seconds. Errors end both."""
    there, back = (
        asyncio.ensure_future(way) for way in (pump(caller[0], target[1]), pump(target[0], caller[1], UNREAD_SECONDS))
    )
    broken = True  # also where this is cancelled, or thrown away at the end of its event loop
    try:
        done, left = await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        if left and not any(way.exception() for way in done):
            more, _ = await asyncio.wait(left, timeout=GRACE_SECONDS if back in done else None)
            done |= more
        broken = any(way.exception() for way in done)
    finally:
        for way in (there, back):
            way.cancel()
        for _, writer in (caller, target):
            writer.transport.abort() if broken else writer.close()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, patience: float = 0) -> None:
    """Pass bytes on in one direction, as fast as the slower side, and then its end. The other direction stays open.

    `patience`: TimeoutError when what was read is not taken within so many seconds; 0 waits for ever.
    """
    while True:
        chunk = await reader.read(CHUNK)
        if not chunk:
            break
        writer.write(chunk)
        if patience and writer.transport.get_write_buffer_size():  # else drain returns at once, without a task
            await asyncio.wait_for(writer.drain(), patience)
        else:
            await writer.drain()
    writer.write_eof()


def connected(target: str) -> Awaitable[Streams]:
    kind, where = parsed(target)
    if kind == "unix":
        return asyncio.open_unix_connection(where)
    host, _, port = where.rpartition(":")
    return asyncio.open_connection(host, int(port))


def parsed(address: str) -> tuple[str, str]:
    kind, _, where = address.partition(":")
    if kind not in ("tcp", "unix") or not where:
        raise SystemExit(f"an address is tcp:HOST:PORT or unix:PATH: {address}")
    return kind, where


async def main(listen: str, target: str, check: str = "") -> None:
    if check:
        try:
            _, writer = await connected(target)
        except OSError as error:
            raise SystemExit(f"{target} cannot be reached ({error})") from error
        writer.close()
    serving = asyncio.ensure_future(serve(listen, target, lambda: print("ready", flush=True)))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    with suppress(asyncio.CancelledError):
        await serving


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit(__doc__)
    parsed(sys.argv[2])
    asyncio.run(main(*sys.argv[1:]))
