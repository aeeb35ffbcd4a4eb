"""Checks keys: agents' keys for the model routes, the admin key for everything else.

Model routes accept agents' keys, and refuse the admin key: agents must not have it. All other routes (metrics, details
of the pool and the engine) need the admin key once one is configured; without one the proxy listens on loopback only.
Left out: users and roles; TLS, which a server in front of a public address has to add.
"""

import re
from hashlib import sha256
from hmac import compare_digest
from ipaddress import ip_address
from pathlib import Path

from aiohttp import web

from proxy.call import CallError
from proxy.config import GatewayConfig
from proxy.pool.errors import UserError

ISSUED_PREFIX = "bf-"
"""Every key that `harness run` issues begins so. On loopback, another key opens a session: an attempt without a run."""
MIN_ADMIN_KEY_CHARS = 16
"""The shortest admin key that is accepted. Nobody types it, so nobody needs a shorter one."""
KEY_IN_PATH = re.compile(r"/r/([^/]+)(?=/)")
"""The key in /r/KEY/v1, for tools that cannot set one."""
KEY_HEADERS = ("x-api-key", "x-goog-api-key", "api-key")
"""The last one is Azure's."""


class Access:
    """Checks the keys of requests. With `open_to_all`, a request without an issued key opens a session."""

    def __init__(self, config: GatewayConfig, key_chars: int):
        self.open_to_all = is_loopback(config.host)
        self._key_chars = key_chars
        self._admin = _digest(key) if (key := _admin_key(config)) else None
        if self._admin is None and not self.open_to_all:
            raise UserError(
                "the proxy has no admin key, so it listens on loopback only; set proxy.admin_key_file "
                f"or proxy.host = '127.0.0.1': {config.host}"
            )

    def agent_key(self, request: web.Request) -> str:
        """Return the key that names the attempt; empty when the request has no key.

        An issued key wins over other keys in headers and query, because some tools always send one of their own.
        CallError 400 when an issued key stands beside another one or another key in the path; 403 for the admin key;
        401 for a key that is too long or not printable.
        """
        in_path = KEY_IN_PATH.findall(request.path)
        keys = [*in_path, *_keys_outside_path(request)]
        for key in keys:
            if len(key) > self._key_chars or not key.isprintable():
                fault = "characters" if key.isprintable() else "characters, of which some are not printable"
                rule = f"send a key of at most {self._key_chars} printable characters"
                raise CallError(401, "invalid_api_key", f"the request's key has {len(key)} {fault}; {rule}")
            if self._is_admin(key):
                raise CallError(
                    403, "permission_denied", "the admin key opens no model calls; give agents their own keys"
                )
        issued = {key for key in keys if key.startswith(ISSUED_PREFIX)}
        named = issued | set(in_path)
        if issued and len(named) > 1:
            raise CallError(400, "invalid_request", f"the request's keys name {len(named)} attempts; send one key")
        return next(iter(issued), next(iter(keys), ""))

    def check_issued(self, request: web.Request) -> None:
        """Raise CallError 401 unless the request's key begins as issued keys do. Only the pool knows if it is one."""
        if not self.agent_key(request).startswith(ISSUED_PREFIX):
            raise CallError(401, "invalid_api_key", "this address serves issued keys only; send the key of the attempt")

    def is_administrator(self, request: web.Request) -> bool:
        """Whether the request may use all routes: it has the admin key, or no admin key is configured."""
        return self._admin is None or self.has_admin_key(request)

    def has_admin_key(self, request: web.Request) -> bool:
        """Whether the request has the admin key; False when none is configured."""
        return any(self._is_admin(key) for key in _keys_outside_path(request))

    def check_administrator(self, request: web.Request) -> None:
        """Raise CallError 401 for anybody but the administrator."""
        if not self.is_administrator(request):
            rule = "needs the proxy's admin key; send it as Authorization: Bearer KEY"
            raise CallError(401, "invalid_api_key", f"{request.method} {request.path} {rule}")

    def _is_admin(self, key: str) -> bool:
        return self._admin is not None and compare_digest(_digest(key), self._admin)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listening address.

    Names are not resolved, so any name but localhost counts as public.
    """
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _admin_key(config: GatewayConfig) -> str | None:
    """Read the admin key from its file, None where none is configured; UserError for a bad key."""
    if not config.admin_key_file:
        return None
    try:
        key = Path(config.admin_key_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the admin key cannot be read ({error}); write one into the file of proxy.admin_key_file: "
            f"{config.admin_key_file}"
        ) from error
    if len(key) < MIN_ADMIN_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise UserError(
            f"the admin key in {config.admin_key_file} has {len(key)} characters, and it needs at least "
            f"{MIN_ADMIN_KEY_CHARS}, all printable ASCII; make one with `openssl rand -hex 32`"
        )
    return key


def _keys_outside_path(request: web.Request) -> list[str]:
    """The keys in Authorization, the KEY_HEADERS and ?key=, in this order."""
    keys = []
    for value in request.headers.getall("Authorization", ()):
        scheme, _, token = value.partition(" ")
        if scheme.lower() == "bearer":
            keys.append(token.strip())
    keys += [value for name in KEY_HEADERS for value in request.headers.getall(name, ())]
    return [key for key in (*keys, *request.query.getall("key", ())) if key]


def _digest(key: str) -> bytes:
    """A hash of equal length for all keys, so that the time of a comparison tells nothing about the key."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
