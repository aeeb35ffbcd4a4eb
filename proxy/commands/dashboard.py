"""The command `proxy dashboard`: pages that show a pool in the browser."""

import argparse
from pathlib import Path

from aiohttp import web

from proxy.commands.serving import STOP_SECONDS, listen, run_servers, url_of
from proxy.dashboard.app import Dashboard
from proxy.pool.database import open_pool

HOST = "127.0.0.1"


def add_arguments(dashboard: argparse.ArgumentParser) -> None:
    """Add the arguments of `proxy dashboard`."""
    dashboard.add_argument("pool", metavar="POOL", help="SQLite file or database URL; it is only read")
    dashboard.add_argument("--port", type=int, default=0, help="port on loopback (default: a free one)")
    dashboard.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="model whose tokenizer shows tokens as text, where the pool names none",
    )
    dashboard.add_argument("--ready-file", type=Path, metavar="FILE", help="written when the pages are served")
    dashboard.set_defaults(run=_dashboard)


def _dashboard(arguments: argparse.Namespace) -> int:
    pool = open_pool(arguments.pool, create=False, read_only=True)
    try:
        dashboard = Dashboard(pool, arguments.model)
        with listen(HOST, arguments.port) as listener:
            runner = web.AppRunner(dashboard.app(), access_log=None, shutdown_timeout=STOP_SECONDS)
            print(f"open {url_of(listener)}/?token={dashboard.access.token}", flush=True)
            return run_servers([(runner, [listener])], arguments.ready_file)
    finally:
        pool.close()
