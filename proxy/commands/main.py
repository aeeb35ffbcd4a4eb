"""The console script: `proxy serve`, `engine`, `tiny-model`, and `replay` and `pool`, which have files of their own.

Both servers stay in the foreground, write a ready file for whoever started them, and end cleanly on SIGTERM or Ctrl-C.
"""

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import uvloop
from aiohttp import web

from proxy.commands import pool
from proxy.commands import replay as replay_cli
from proxy.config import ProxyConfig, load_config
from proxy.engine.scripted import ScriptedEngine, load_script
from proxy.engine.sglang import Sglang
from proxy.engine.tiny_model import make_tiny_model
from proxy.http import sandbox_listener
from proxy.http.redact import RedactingFormatter
from proxy.pool.errors import UserError
from proxy.pool.files import write_whole
from proxy.prompt.template import ChatTemplate
from proxy.server import Gateway

STOP_SECONDS = 5
"""How long calls in progress may take when the server is told to stop."""
GARBAGE_THRESHOLD = 20_000
"""Objects by which the heap grows before the collector looks for cycles; Python's 700 would be several times a call."""


def main(argv: list[str] | None = None) -> int:
    """Run a command; 2 and one sentence on stderr for what the user must change."""
    arguments = _parser().parse_args(argv)
    _log_to_stderr()
    for chatty in ("aiohttp.access", "alembic"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        return int(arguments.run(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="proxy", description="The gateway that agents talk to, and its engine.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve agents and record every model call")
    serve.add_argument("config", type=Path)
    serve.add_argument(
        "--engine", metavar="URL", action="append", help="a running engine, once per replica (default: engine.url)"
    )
    serve.add_argument("--pool", metavar="URL", help="SQLite file or database URL (default: pool)")
    serve.add_argument("--port", type=int, help="port to listen on, 0 for a free one (default: proxy.port)")
    serve.add_argument("--ready-file", type=Path, metavar="FILE", help="written when the server accepts calls")
    sandbox_listener.add_arguments(serve)
    serve.set_defaults(run=_serve)
    engine = commands.add_parser("engine", help="run the inference engine")
    engine.add_argument("config", type=Path)
    engine.add_argument("--scripted", metavar="FILE.py:NAME", help="serve a script instead of the model")
    engine.add_argument("--ready-file", type=Path, metavar="FILE", help="written when the engine is healthy")
    engine.add_argument(
        "--log", type=Path, metavar="FILE", help="SGLang's output (default: engine.log beside the config)"
    )
    engine.set_defaults(run=_engine)
    replay = commands.add_parser("replay", help="serve a recorded attempt again, without an engine")
    replay.add_argument("config", type=Path)
    replay_cli.add_arguments(replay)
    sandbox_listener.add_arguments(replay)
    replay.set_defaults(run=_replay)
    tiny = commands.add_parser("tiny-model", help="make a tiny random Qwen3 model")
    tiny.add_argument("directory", type=Path)
    tiny.add_argument("--seed", type=int, default=0)
    tiny.set_defaults(run=_tiny_model)
    pool.add_commands(commands.add_parser("pool", help="check, show and export what is recorded"))
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    config = _overridden(load_config(arguments.config), arguments)
    gateway = Gateway(config, tuple(arguments.engine or ()) or config.engine.url)
    return _serve_gateway(gateway, arguments.ready_file)


def _replay(arguments: argparse.Namespace) -> int:
    config = _overridden(sandbox_listener.without_listeners(load_config(arguments.config)), arguments)
    with replay_cli.opened(config, arguments) as gateway:
        _serve_gateway(gateway, arguments.ready_file)
        return replay_cli.summed_up(gateway)


def _overridden(config: ProxyConfig, arguments: argparse.Namespace) -> ProxyConfig:
    if arguments.pool:
        config = msgspec.structs.replace(config, pool=arguments.pool)
    if arguments.port is not None:
        config = msgspec.structs.replace(config, proxy=msgspec.structs.replace(config.proxy, port=arguments.port))
    return sandbox_listener.with_arguments(config, arguments)


def _serve_gateway(gateway: Gateway, ready_file: Path | None) -> int:
    """Serve a gateway on its own address, and sandboxes where the configuration says."""
    config = gateway.config.proxy
    with ExitStack() as stack:
        listener = stack.enter_context(_listen(config.host, config.port))
        served = [(gateway.runner(STOP_SECONDS), [listener])]
        if listeners := [stack.enter_context(made) for made in _for_sandboxes(gateway, stack)]:
            served.append((gateway.sandbox_runner(STOP_SECONDS), listeners))
        return _run(served, ready_file)


def _for_sandboxes(gateway: Gateway, stack: ExitStack) -> Iterator[socket.socket]:
    config, told = gateway.config.proxy, gateway.for_sandboxes
    if config.sandbox_socket:
        path = Path(config.sandbox_socket)
        yield sandbox_listener.listen_unix(path)
        stack.callback(path.unlink, missing_ok=True)
        told["socket"] = config.sandbox_socket
    if config.sandbox_address:
        listener = _listen(*sandbox_listener.parse_address(config.sandbox_address))
        told["address"] = _url(listener)
        yield listener


def _engine(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config).engine
    template = ChatTemplate(Path(config.model))  # SGLang would notice what is missing half a minute later, in its log
    if arguments.scripted:
        engine = ScriptedEngine(load_script(arguments.scripted), template)
        runner = web.AppRunner(engine.app(), access_log=None, shutdown_timeout=STOP_SECONDS, handler_cancellation=True)
        return _run([(runner, [_listen("127.0.0.1", config.port)])], arguments.ready_file)
    if config.port:
        _listen("127.0.0.1", config.port).close()
    server = Sglang(config, arguments.log or arguments.config.parent / "engine.log")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        server.wait_healthy()
        _ready(server.url, arguments.ready_file)
        while server.exited() is None:
            time.sleep(0.2)
        raise UserError(server.failed(f"ended with status {server.exited()}"))
    except KeyboardInterrupt:
        return 0
    finally:
        server.stop()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _tiny_model(arguments: argparse.Namespace) -> int:
    make_tiny_model(arguments.directory, arguments.seed)
    print(f"model: {arguments.directory}")
    return 0


def _listen(host: str, port: int) -> socket.socket:
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


ServedApps = Sequence[tuple[web.AppRunner, Sequence[socket.socket]]]
"""Applications with the sockets that they listen on. The first socket's address is the server's."""


def _run(served: ServedApps, ready_file: Path | None) -> int:
    gc.freeze()  # what is loaded stays, and
    gc.set_threshold(GARBAGE_THRESHOLD, 20, 100)  # calls make many short-lived objects that are no cycles
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        loop.run(_until_stopped(served, _url(served[0][1][0]), ready_file))
    return 0


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


async def _until_stopped(served: ServedApps, url: str, ready_file: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    for runner, listeners in served:
        await runner.setup()
        for listener in listeners:
            await web.SockSite(runner, listener).start()
    _ready(url, ready_file)
    await stop.wait()
    for runner, _ in reversed(served):
        await runner.cleanup()


def _ready(url: str, file: Path | None) -> None:
    print(f"ready: {url}", flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, msgspec.json.encode({"url": url, "pid": os.getpid()}))
