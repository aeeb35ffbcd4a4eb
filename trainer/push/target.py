"""One SGLang server as a push sees it: what it is, and the requests that stop it, change it and let it go on.

Every request has its time; whatever goes wrong with one is `PushFailed`. Left out: which engines there are, and what
becomes of a push that one of them fails (trainer/push/__init__.py).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec

from trainer.config import Push

TROUBLE = (OSError, HTTPException, msgspec.DecodeError)
"""What an engine that is down, starting or broken makes of a request; URLError and timeouts are OSErrors."""
LOADING = "-loading"
"""What an engine's version ends with while its weights are in part those of that version, and after that failed."""


class PushFailed(Exception):
    """An engine did not do what it was asked. Its text is the reason, to be put after the engine's address."""


class ServerInfo(msgspec.Struct, frozen=True):
    """What an engine says of itself in /server_info."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    device: str | None = None
    """cuda | cpu | ..."""
    hicache_storage_backend: str | None = None
    """Where it keeps cached prefixes outside of itself."""


class PushTarget:
    """The requests of one push to one server."""

    def __init__(self, url: str, options: Push):
        self.url, self.options = url.rstrip("/"), options
        self.about = ServerInfo()

    def describe(self) -> None:
        """Learn what it is. The one request that is tried again: an engine may be starting."""
        for left in reversed(range(self.options.tries)):
            try:
                self.about = msgspec.convert(self.ask("/server_info"), ServerInfo)
                return
            except (PushFailed, msgspec.ValidationError) as error:
                if not left:
                    raise PushFailed(str(error)) from error
                time.sleep(1)

    def served(self) -> str:
        """The version that it names; empty when it names none."""
        return str(self.ask("/model_info").get("weight_version") or "")

    def pause(self) -> None:
        """Calls in flight wait, their cache is dropped; they go on with whatever weights are there then."""
        self.ask("/pause_generation", {"mode": "retract"})

    def go_on(self) -> None:
        self.ask("/continue_generation", {})

    def name(self, version: str) -> None:
        """Have it name this version from now on, whatever its weights are."""
        self.ask("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    @contextmanager
    def session(self) -> Iterator[None]:
        """What updates in parts stand in. One that a trainer left open when it died is closed first."""
        try:
            self.load("/begin_weight_update", {"selector": "all"})
        except PushFailed:
            self.load("/end_weight_update", {})
            self.load("/begin_weight_update", {"selector": "all"})
        try:
            yield
        except PushFailed:
            with suppress(PushFailed):  # the first failure is the one to tell
                self.load("/end_weight_update", {})
            raise
        self.load("/end_weight_update", {})

    def clear_store(self) -> None:
        """Empty the cache outside of the engine, which knows no versions and which no flush reaches."""
        if self.about.hicache_storage_backend:
            self.ask("/hicache/storage-backend/clear", {})

    def checksums(self) -> tuple[str, ...]:
        """Of all weights, one for each different shard. Equal weights split in the same way have equal ones."""
        ranks = self.load("/weights_checker", {"action": "checksum"}).get("ranks")
        if not ranks:  # engines that say nothing must not pass for equal
            raise PushFailed("names no checksums of its weights, so that they cannot be compared with its peers'")
        return tuple(sorted({str(rank["per_gpu_checksum"]) for rank in ranks}))

    def abandon(self) -> None:
        """It stays paused, as its weights are of no version; its calls end, so that they can be sampled elsewhere."""
        with suppress(PushFailed):  # one that is gone has no calls left
            self.ask("/abort_request", {"abort_all": True})

    def load(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """A request that may take as long as weights take."""
        return self._once(path, body, self.options.timeout_seconds)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A request that takes no time of its own. Without a body it is a GET."""
        return self._once(path, body, self.options.answer_seconds)

    def _once(self, path: str, body: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        data = None if body is None else msgspec.json.encode(body)
        try:
            request = Request(self.url + path, data, {"content-type": "application/json"})
            with urlopen(request, timeout=seconds) as response:
                text = response.read()
            answer: dict[str, Any] = msgspec.json.decode(text) if text.startswith(b"{") else {}
        except TROUBLE as error:
            reason = error.read().decode(errors="replace")[:300] if isinstance(error, HTTPError) else error
            raise PushFailed(f"failed at {path} ({reason})") from error
        if answer.get("success") is False:
            raise PushFailed(f"failed at {path} ({answer.get('message')})")
        return answer
