"""What a Dockerfile lets the daemon fetch by ADD. The daemon does so with its own network, which we do not limit.

So the hosts are looked up before the build, and one at a private or near address is refused, as is a source that is not
known before. Left out: a public server that leads the daemon on to a private one, and what FROM names.
"""

import ipaddress
import json
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from urllib.parse import urlsplit

from sandboxes.network.routes import FORBIDDEN

CONTINUED = [re.compile(end + r"[ \t]*$") for end in (r"\\", r"(?<!\\)\\", "`", "(?<!`)`")]
"""Ends of a line that goes on. Docker's versions differ in where `# escape=` counts and in what a doubled end means, so
all are tried."""


def forbidden_source(dockerfile: str, near: Sequence[str] = ()) -> str:
    """Return a sentence about the first source of ADD that a build may not reach; empty when there is none.

    `near`: addresses of this machine.
    """
    for source in dict.fromkeys(_remote_sources(dockerfile)):
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
    text = re.sub(r"[\x1c-\x1f]", "?", dockerfile)  # blanks to Python, not to Docker
    for continued in CONTINUED:
        for instruction in _instructions(text, continued):
            if match := re.fullmatch(r"\s*(?:ONBUILD\s+)?ADD\s+(.*)", instruction, re.IGNORECASE | re.DOTALL):
                yield from _sources(match[1])


def _instructions(dockerfile: str, continued: re.Pattern[str]) -> Iterator[str]:
    """Yield instructions as Docker joins their lines: without a blank between them, past empty lines and comments."""
    whole = ""
    for line in dockerfile.split("\n"):
        line = line.removesuffix("\r")
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        end = continued.search(line)
        whole += line[: end.start()] if end else line
        if end is None:
            yield whole
            whole = ""
    yield whole


def _sources(arguments: str) -> Iterator[str]:
    for word in chain(_json_words(arguments), arguments.split()[:-1]):
        source = re.sub(r"[\"'\\`]", "", word)  # the builder drops these before it looks for an address
        source = source.lstrip("[").rstrip(",")  # it may be a word of a list
        variable = "$" in source and not source.startswith((".", "/", "--"))  # no address begins so
        if "://" in source or variable or source.startswith("git@"):
            yield source


def _json_words(arguments: str) -> Iterator[str]:
    """Yield the words of lists. Docker finds one behind flags with blanks, and ignores what follows it."""
    for begin in re.finditer(r"\[", arguments):
        with suppress(ValueError, RecursionError):
            yield from map(str, json.JSONDecoder().raw_decode(arguments, begin.start())[0][:-1])
