"""The command `proxy engine`: SGLang with the configured model, or a script in its place."""

import argparse
import signal
import time
from pathlib import Path

from aiohttp import web

from proxy.commands.serving import STOP_SECONDS, announce, listen, run_servers
from proxy.config import load_config
from proxy.engine.scripted import ScriptedEngine, load_script
from proxy.engine.sglang import Sglang
from proxy.pool.errors import UserError
from proxy.pool.terminal.progress import progress
from proxy.prompt.template import ChatTemplate


def add_arguments(engine: argparse.ArgumentParser) -> None:
    """Add the arguments of `proxy engine`."""
    engine.add_argument("config", type=Path)
    engine.add_argument("--scripted", metavar="FILE.py:NAME", help="serve a script instead of the model")
    engine.add_argument("--ready-file", type=Path, metavar="FILE", help="written when the engine is healthy")
    engine.add_argument(
        "--log", type=Path, metavar="FILE", help="SGLang's output (default: engine.log beside the config)"
    )
    engine.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config).engine
    template = ChatTemplate(Path(config.model))  # fails at once; SGLang would fail half a minute later, in its log
    if arguments.scripted:
        engine = ScriptedEngine(load_script(arguments.scripted), template)
        runner = web.AppRunner(engine.app(), access_log=None, shutdown_timeout=STOP_SECONDS, handler_cancellation=True)
        return run_servers([(runner, [listen("127.0.0.1", config.port)])], arguments.ready_file)
    if config.port:
        listen("127.0.0.1", config.port).close()  # a port in use is an error now, not in SGLang's log
    server = Sglang(config, arguments.log or arguments.config.parent / "engine.log")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with progress(lambda: f"SGLang loads {config.model}{server.loaded()}"):
            server.wait_healthy()
        announce(server.url, arguments.ready_file)
        while server.exited() is None:
            time.sleep(0.2)
        raise UserError(server.failed(f"ended with status {server.exited()}"))
    except KeyboardInterrupt:
        return 0
    finally:
        server.stop()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
