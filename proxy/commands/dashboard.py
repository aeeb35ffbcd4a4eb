"""The command `proxy dashboard`: pages that show a pool in the browser."""

import argparse
from pathlib import Path

from aiohttp import web

from proxy.commands.serving import STOP_SECONDS, listen, run_servers, url_of
from proxy.dashboard.app import Dashboard, DashboardOptions
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError

HOST = "127.0.0.1"


def add_arguments(dashboard: argparse.ArgumentParser) -> None:
    """Add the arguments of `proxy dashboard`."""
    dashboard.add_argument("pool", metavar="POOL", help="SQLite file or database URL; it is only read")
    dashboard.add_argument("--port", type=int, default=0, help="port on loopback (default: a free one)")
    dashboard.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="model whose tokenizer shows tokens as text (default: what the pool leads to)",
    )
    dashboard.add_argument(
        "--proxy", metavar="URL", action="append", default=[], help="a proxy to ask for its engines, once for each"
    )
    dashboard.add_argument("--admin-key-file", type=Path, metavar="FILE", help="the key of the proxies' administrator")
    dashboard.add_argument("--ready-file", type=Path, metavar="FILE", help="written when the pages are served")
    dashboard.set_defaults(run=_dashboard)


def _dashboard(arguments: argparse.Namespace) -> int:
    pool = open_pool(arguments.pool, create=False, read_only=True)
    try:
        options = DashboardOptions(
            model=arguments.model, proxies=arguments.proxy, admin_key=_admin_key(arguments.admin_key_file)
        )
        dashboard = Dashboard(pool, options)
        with listen(HOST, arguments.port) as listener:
            runner = web.AppRunner(dashboard.app(), access_log=None, shutdown_timeout=STOP_SECONDS)
            print(f"open {url_of(listener)}/?token={dashboard.access.token}", flush=True)
            return run_servers([(runner, [listener])], arguments.ready_file)
    finally:
        pool.close()


def _admin_key(file: Path | None) -> str | None:
    try:
        return None if file is None else file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"the admin key cannot be read ({error}); name the proxy's with --admin-key-file") from error
