"""Who may call what: the keys in a request, and the admin key.

Model routes serve agents' keys, and refuse the admin key: agents must not have it. Everything else that the proxy tells
(its pool, its engine) is for the bearer of the admin key once one is configured; without one the proxy listens on
loopback only. Left out: users and roles; TLS, which belongs to whatever stands in front of a public address.
"""

import os
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
"""How keys begin that `harness run` issues. Any other key is one of nobody, which opens a session on loopback."""
MIN_ADMIN_KEY_CHARS = 16
"""Characters of an admin key. Nobody types it, so nobody needs a short one."""
KEY_IN_PATH = re.compile(r"/r/([^/]+)(?=/)")
KEY_HEADERS = ("x-api-key", "x-goog-api-key")


class Access:
    """What the configuration allows. `open_to_all`: unknown keys, and none, are served as sessions of their own."""

    def __init__(self, config: GatewayConfig, key_chars: int):
        self.open_to_all = is_loopback(config.host)
        self._key_chars = key_chars
        self._admin = _digest(key) if (key := _admin_key(config)) else None
        if self._admin is None and not self.open_to_all:
            raise UserError(
                "the proxy has no admin key, so it listens on loopback only; name one by proxy.admin_key_file or "
                f"proxy.admin_key_env, or set proxy.host = '127.0.0.1': {config.host}"
            )

    def agent_key(self, request: web.Request) -> str:
        """The key that names the attempt; empty when the request has none.

        A key that was issued counts before any other, since some tools always send a key of their own. CallError 400
        when the request names two attempts, 403 for the admin key, 401 for what cannot be a key.
        """
        in_path, elsewhere = KEY_IN_PATH.findall(request.path), _outside_path(request)
        given = [*in_path, *elsewhere]
        for key in given:
            if len(key) > self._key_chars or not key.isprintable():
                rule = f"a key has at most {self._key_chars} printable characters"
                raise CallError(401, "invalid_api_key", f"the request's key has {len(key)}; {rule}")
            if self._is_admin(key):
                raise CallError(403, "permission_denied", "this is the admin key; give agents keys of their own")
        issued = {key for key in given if key.startswith(ISSUED_PREFIX)}
        named = issued | set(in_path)
        if issued and len(named) > 1:
            raise CallError(
                400, "invalid_request", f"the request names {len(named)} attempts by its keys; send one key"
            )
        return next(iter(issued), next(iter(given), ""))

    def check_issued(self, request: web.Request) -> None:
        """CallError 401 unless the request's key has the form of issued ones. The pool says whether it was issued."""
        if not self.agent_key(request).startswith(ISSUED_PREFIX):
            raise CallError(401, "invalid_api_key", "sandboxes are served by the key of their attempt only")

    def is_administrator(self, request: web.Request) -> bool:
        """Whether the request has the admin key, or none is needed."""
        return self._admin is None or any(self._is_admin(key) for key in _outside_path(request))

    def check_administrator(self, request: web.Request) -> None:
        """CallError 401 for anybody else."""
        if not self.is_administrator(request):
            wanted = "needs the proxy's admin key as Authorization: Bearer KEY"
            raise CallError(401, "invalid_api_key", f"{request.method} {request.path} {wanted}")

    def _is_admin(self, key: str) -> bool:
        return self._admin is not None and compare_digest(_digest(key), self._admin)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a listening address. Names other than localhost may mean anything."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _admin_key(config: GatewayConfig) -> str | None:
    """The admin key, which stands where the configuration says; UserError when it does not."""
    if config.admin_key_file and config.admin_key_env:
        raise UserError("the admin key has two sources, proxy.admin_key_file and proxy.admin_key_env; keep one")
    if config.admin_key_file:
        try:
            key = Path(config.admin_key_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"the admin key cannot be read ({error}); write one into the file of proxy.admin_key_file: "
                f"{config.admin_key_file}"
            ) from error
    elif config.admin_key_env:
        key = os.environ.get(config.admin_key_env, "").strip()
    else:
        return None
    where = config.admin_key_file or config.admin_key_env
    if len(key) < MIN_ADMIN_KEY_CHARS or not key.isascii() or not key.isprintable():
        raise UserError(
            f"the admin key in {where} has {len(key)} characters, and it needs at least {MIN_ADMIN_KEY_CHARS}, all "
            "printable ASCII; make one with `openssl rand -hex 32`"
        )
    return key


def _outside_path(request: web.Request) -> list[str]:
    """The keys in Authorization, x-api-key, x-goog-api-key and ?key=, in this order."""
    found = []
    for value in request.headers.getall("Authorization", ()):
        scheme, _, token = value.partition(" ")
        if scheme.lower() == "bearer":
            found.append(token.strip())
    found += [value for name in KEY_HEADERS for value in request.headers.getall(name, ())]
    return [key for key in (*found, *request.query.getall("key", ())) if key]


def _digest(key: str) -> bytes:
    """Of equal length for all keys, so that a comparison tells nothing about them."""
    return sha256(key.encode("utf-8", "surrogateescape")).digest()
