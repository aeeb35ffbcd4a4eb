"""Listeners for sandboxes: the model routes, for issued keys, and no other route at all.

A Unix socket serves sandboxes without a network, into which its directory is mounted; an address serves those on other
machines, behind a relay. Neither needs an admin key, since neither has anything that one would guard. Left out: that a
key comes through the sandbox it was issued for. A key is known to its own sandbox only, and dies with its attempt.
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
"""Bytes of a Unix socket's path (sun_path of unix(7), without the NUL)."""


def add_arguments(serve: argparse.ArgumentParser) -> None:
    serve.add_argument("--sandbox-socket", metavar="PATH", help="listen for sandboxes here (default: proxy.*)")
    serve.add_argument("--sandbox-address", metavar="HOST:PORT", help="listen for sandboxes here, too")


def without_listeners(config: ProxyConfig) -> ProxyConfig:
    """The configuration for a server beside the proxy that it is written for, whose listeners these are."""
    proxy = msgspec.structs.replace(config.proxy, sandbox_socket="", sandbox_address="")
    return msgspec.structs.replace(config, proxy=proxy)


def with_arguments(config: ProxyConfig, given: argparse.Namespace) -> ProxyConfig:
    """The configuration with what the command line says about sandboxes."""
    changed: dict[str, str] = {}
    if given.sandbox_socket:
        changed["sandbox_socket"] = str(Path(given.sandbox_socket).absolute())
    if given.sandbox_address:
        changed["sandbox_address"] = given.sandbox_address
    return msgspec.structs.replace(config, proxy=msgspec.structs.replace(config.proxy, **changed))


def listen_unix(path: Path) -> socket.socket:
    """A listener that any user inside a sandbox can connect to; UserError when there cannot be one.

    What is outside reaches it by the directories above only, so these decide who else may.
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
        path.chmod(0o666)  # the user inside is another one, and nobody at all where users are remapped
        path.parent.chmod(path.parent.stat().st_mode | 0o111)
    except OSError as error:
        listener.close()
        raise UserError(
            f"the sandbox socket cannot be made ({error.strerror}); name one in a directory of your own: {path}"
        ) from error
    except UserError:
        listener.close()
        raise
    return listener


def _make_room(path: Path) -> None:
    """Remove what a killed proxy left; UserError when another proxy is there, or anything else."""
    others = [other.name for other in path.parent.iterdir() if other != path]
    if others:
        raise UserError(
            "the sandbox socket's directory is shown to sandboxes, so it must hold nothing else; name one of its own: "
            f"{path.parent} holds {others[0]}"
        )
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise UserError(f"the sandbox socket's place is taken by a file; remove it or name another: {path}")
    with socket.socket(socket.AF_UNIX) as probe:
        if probe.connect_ex(str(path)) == 0:
            raise UserError(f"the sandbox socket is in use by another proxy; stop that or name another: {path}")
    path.unlink()


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `proxy.sandbox_address`; UserError when it is none."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise UserError(f"the sandbox address is HOST:PORT with a port up to 65535, 0 for a free one: {text}")
    return host.strip("[]"), int(port)
