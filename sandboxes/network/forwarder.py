"""How what runs in a sandbox without a network finds the proxy: a mounted socket, and a forwarder on its loopback.

The forwarder is `sandboxes/network/relay.py`; it is handed to the interpreter as an argument, so nothing has to be
mounted or copied for it, here or on another machine.
"""

from pathlib import Path

from sandboxes.network import relay

PORT = 8311
URL = f"http://127.0.0.1:{PORT}"
"""The proxy as every sandbox of network `model` finds it, without /v1."""
DIRECTORY = "/run/blackforge/model"
"""Where the socket's directory is mounted in a sandbox, read-only."""
SOCKET = "proxy.sock"
LISTEN = f"tcp:127.0.0.1:{PORT}"
TARGET = f"unix:{DIRECTORY}/{SOCKET}"
"""What the forwarder is started with."""


def forwarder(python: str, listen: str = LISTEN, target: str = TARGET) -> list[str]:
    """The command that passes connections on until it is killed; it prints `ready` once it can."""
    return [python, "-I", "-S", "-c", Path(relay.__file__).read_text(), listen, target]
