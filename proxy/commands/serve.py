"""The command `proxy serve`: the gateway on its own address, and on the listeners for sandboxes."""

import argparse
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec

from proxy.commands.serving import STOP_SECONDS, listen, run_servers, url_of
from proxy.config import ProxyConfig, load_config
from proxy.http import sandbox_listener
from proxy.http.connections import raise_open_file_limit
from proxy.server import Gateway


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """Add the arguments of `proxy serve`."""
    serve.add_argument("config", type=Path)
    serve.add_argument(
        "--engine", metavar="URL", action="append", help="a running engine, once per replica (default: engine.url)"
    )
    serve.add_argument("--pool", metavar="URL", help="SQLite file or database URL (default: pool)")
    serve.add_argument("--port", type=int, help="port to listen on, 0 for a free one (default: proxy.port)")
    serve.add_argument("--ready-file", type=Path, metavar="FILE", help="written when the server accepts calls")
    sandbox_listener.add_arguments(serve)
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    config = with_arguments(load_config(arguments.config), arguments)
    raise_open_file_limit()
    gateway = Gateway(config, tuple(arguments.engine or ()) or config.engine.url)
    return serve_gateway(gateway, arguments.ready_file)


def with_arguments(config: ProxyConfig, arguments: argparse.Namespace) -> ProxyConfig:
    """The configuration with the pool, port and listeners of the command line."""
    if arguments.pool:
        config = msgspec.structs.replace(config, pool=arguments.pool)
    if arguments.port is not None:
        config = msgspec.structs.replace(config, proxy=msgspec.structs.replace(config.proxy, port=arguments.port))
    return sandbox_listener.with_arguments(config, arguments)


def serve_gateway(gateway: Gateway, ready_file: Path | None) -> int:
    """Serve a gateway on its own address, and on the configured listeners for sandboxes, until it is stopped."""
    config = gateway.config.proxy
    with ExitStack() as stack:
        apps = [(gateway.runner(STOP_SECONDS), [stack.enter_context(listen(config.host, config.port))])]
        if listeners := [stack.enter_context(listener) for listener in _sandbox_listeners(gateway, stack)]:
            apps.append((gateway.sandbox_runner(STOP_SECONDS), listeners))
        return run_servers(apps, ready_file)


def _sandbox_listeners(gateway: Gateway, stack: ExitStack) -> Iterator[socket.socket]:
    """Open the configured listeners, and note their addresses in the gateway for /health."""
    config = gateway.config.proxy
    if config.sandbox_socket:
        path = Path(config.sandbox_socket)
        yield sandbox_listener.listen_unix(path)
        stack.callback(path.unlink, missing_ok=True)
        gateway.for_sandboxes["socket"] = config.sandbox_socket
    if config.sandbox_address:
        listener = listen(*sandbox_listener.parse_address(config.sandbox_address))
        gateway.for_sandboxes["address"] = url_of(listener)
        yield listener
