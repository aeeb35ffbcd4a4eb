"""Listeners for sandboxes, which serve the model routes for issued keys and no other route.

A Unix socket serves sandboxes that have no network: its directory is mounted into them. An address serves those on
other machines, behind a relay. Neither needs an admin key, since neither has a route that the key guards. Left out: a
check that a key comes from its own sandbox. Only that sandbox knows the key, which is revoked with its attempt.
"""

import argparse
import os
import socket
import stat
from pathlib import Path

import msgspec

from proxy.config import ProxyConfig
from proxy.pool.errors import UserError

MAX_SOCKET_PATH_BYTES = 107
"""The longest path of a Unix socket (sun_path of unix(7), without the NUL)."""


def add_arguments(serve: argparse.ArgumentParser) -> None:
    """Add the options that override the configuration's listeners for sandboxes."""
    serve.add_argument("--sandbox-socket", metavar="PATH", help="Unix socket for sandboxes (default: proxy.*)")
    serve.add_argument("--sandbox-address", metavar="HOST:PORT", help="address for sandboxes, too")


def without_listeners(config: ProxyConfig) -> ProxyConfig:
    """Drop the listeners from the configuration: they belong to the proxy that it was written for."""
    proxy = msgspec.structs.replace(config.proxy, sandbox_socket="", sandbox_address="")
    return msgspec.structs.replace(config, proxy=proxy)


def with_arguments(config: ProxyConfig, arguments: argparse.Namespace) -> ProxyConfig:
    """The configuration with the command line's listeners."""
    changed: dict[str, str] = {}
    if arguments.sandbox_socket:
        changed["sandbox_socket"] = str(Path(arguments.sandbox_socket).absolute())
    if arguments.sandbox_address:
        changed["sandbox_address"] = arguments.sandbox_address
    return msgspec.structs.replace(config, proxy=msgspec.structs.replace(config.proxy, **changed))


def listen_unix(path: Path) -> socket.socket:
    """Make a socket that any user inside a sandbox can connect to; UserError when that fails.

    Outside of sandboxes, the permissions of the directories above it decide who can connect.
    """
    size = len(os.fsencode(path))
    if size > MAX_SOCKET_PATH_BYTES:
        raise UserError(
            f"the sandbox socket's path has {size} bytes, and a Unix socket's has at most {MAX_SOCKET_PATH_BYTES}; "
            f"name a shorter one: {path}"
        )
    listener = socket.socket(socket.AF_UNIX)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_room(path)
        listener.bind(str(path))
        path.chmod(0o666)  # the user inside a sandbox is another one, and an unmapped one in a user namespace
        path.parent.chmod(path.parent.stat().st_mode | 0o111)
    except OSError as error:
        listener.close()
        raise UserError(
            f"the sandbox socket cannot be created ({error.strerror}); name one in a directory that you own: {path}"
        ) from error
    except UserError:
        listener.close()
        raise
    return listener


def _make_room(path: Path) -> None:
    """Remove the socket of a killed proxy; UserError when another proxy uses it, or other files are there."""
    others = [other.name for other in path.parent.iterdir() if other != path]
    if others:
        raise UserError(
            "sandboxes see the directory of the sandbox socket, so it must hold nothing else; use a directory of its "
            f"own: {path.parent} holds {others[0]}"
        )
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise UserError(f"the path of the sandbox socket is a file; remove it or name another path: {path}")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise UserError(f"another proxy uses this sandbox socket; stop it or name another path: {path}")
    path.unlink()


def parse_address(text: str) -> tuple[str, int]:
    """Split HOST:PORT of `proxy.sandbox_address`; UserError for anything else."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"the sandbox address must be HOST:PORT with a port up to 65535, 0 for a free one: {text}")
    return host.strip("[]"), int(port)
