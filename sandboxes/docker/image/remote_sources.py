"""What a Dockerfile lets the daemon fetch by ADD. The daemon does so with its own network, which we do not limit.

So the hosts are looked up before the build, and one at a private or near address is refused, as is a source that is not
known before. Left out: a public server that leads the daemon on to a private one, and what FROM names.
"""

import ipaddress
import json
import re
import socket
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from sandboxes.network.routes import FORBIDDEN


def forbidden_source(dockerfile: str, near: Sequence[str] = ()) -> str:
    """Return a sentence about the first source of ADD that a build may not reach; empty when there is none.

    `near`: addresses of this machine.
    """
    for source in _remote_sources(dockerfile):
        if "$" in source:
            return f"ADD {source}: what a variable stands for is not known before the build; write it out, or use RUN"
        try:
            host = urlsplit(source if "://" in source else f"ssh://{source}").hostname or ""
            addresses = {entry[4][0] for entry in socket.getaddrinfo(host.rstrip("."), None)}
        except (OSError, ValueError) as error:  # the daemon may know another name server
            return f"ADD {source}: its host cannot be looked up ({error}); copy the file instead"
        for address in map(ipaddress.ip_address, addresses):
            if address.is_loopback or any(address in ipaddress.ip_network(one) for one in (*FORBIDDEN, *near)):
                return f"ADD {source}: {address} is private or near, where builds do not reach; copy the file instead"
    return ""


def _remote_sources(dockerfile: str) -> Iterator[str]:
    """Yield the sources of ADD that are, or may be, no files of the context."""
    escape = re.search(r"\A(?:#[^\n]*\n)*?#\s*escape\s*=\s*(\S)", dockerfile, re.IGNORECASE)
    lines = [line for line in dockerfile.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(re.escape(escape[1] if escape else "\\") + r"[ \t]*\n", " ", "\n".join(lines))
    for match in re.finditer(r"^\s*(?:ONBUILD\s+)?ADD\s+(.*)$", joined, re.IGNORECASE | re.MULTILINE):
        text = re.sub(r"^(?:--\S+\s+)*", "", match[1])
        try:
            words = [str(word) for word in json.loads(text)] if text.startswith("[") else text.split()
        except ValueError:
            words = text.split()
        for word in words[:-1]:
            source = re.sub(r"[\"'\\]", "", word)  # the builder drops these before it looks for an address
            variable = "$" in source and not source.startswith((".", "/"))  # no address begins so
            if "://" in source or variable or source.startswith("git@"):
                yield source
