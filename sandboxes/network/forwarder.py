"""How a sandbox without a network reaches the proxy: a mounted socket, and a forwarder on its loopback.

The forwarder is `sandboxes/network/relay.py`. Its source is passed to the interpreter as an argument, so nothing has to
be mounted or copied for it, on this machine or another.
"""

from pathlib import Path

from sandboxes.network import relay

PORT = 8311
URL = f"http://127.0.0.1:{PORT}"
"""URL of the proxy in every sandbox of network `model`, without /v1."""
DIRECTORY = "/run/blackforge/model"
"""Where the socket's directory is mounted in a sandbox, read-only."""
SOCKET = "proxy.sock"
LISTEN = f"tcp:127.0.0.1:{PORT}"
TARGET = f"unix:{DIRECTORY}/{SOCKET}"
"""Arguments of the forwarder: where it listens, and where it passes connections on to."""


def forwarder(python: str, listen: str = LISTEN, target: str = TARGET) -> list[str]:
    """Return the command that forwards connections until it is killed. It prints `ready` once it listens."""
    return [python, "-I", "-S", "-c", Path(relay.__file__).read_text(), listen, target]
