"""Runs HTTP servers in the foreground: listens, announces when they are ready, and ends on SIGTERM or Ctrl-C."""

import asyncio
import gc
import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from proxy.pool.errors import UserError
from proxy.pool.files import write_whole

STOP_SECONDS = 5
"""Time that calls in flight have to end once the server shuts down."""
GARBAGE_THRESHOLD = 20_000
"""New objects after which the garbage collector runs. With Python's default (700) it would run several times a call."""

ServedApps = Sequence[tuple[web.AppRunner, Sequence[socket.socket]]]
"""Applications with the sockets that they listen on. The address of the first socket is the one announced."""


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket for `run_servers` to listen on; port 0 takes a free port. UserError when that fails."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"port {port} on {host} cannot be used ({error.strerror}); "
            "stop what listens there, or set port 0 for a free one"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def run_servers(apps: ServedApps, ready_file: Path | None) -> int:
    """Serve until SIGTERM or Ctrl-C, and return exit status 0. Each runner sets how long calls may take to end."""
    gc.freeze()  # what is loaded stays for good, so the collector need not look at it
    # Calls make many short-lived objects, and few of them form cycles, so older objects are also looked at less often.
    gc.set_threshold(GARBAGE_THRESHOLD, 20, 100)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(_serve_until_stopped(apps, ready_file))
    return 0


async def _serve_until_stopped(apps: ServedApps, ready_file: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    for runner, listeners in apps:
        await runner.setup()
        for listener in listeners:
            await web.SockSite(runner, listener).start()
    announce(url_of(apps[0][1][0]), ready_file)
    await stop.wait()
    for runner, _ in reversed(apps):  # the server for sandboxes uses what the first app started, so it stops first
        await runner.cleanup()


def announce(url: str, ready_file: Path | None) -> None:
    """Print the server's URL, and write it with the process id to the ready file."""
    print(f"ready: {url}", flush=True)
    if ready_file is not None:
        ready_file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(ready_file, msgspec.json.encode({"url": url, "pid": os.getpid()}))
