"""One SGLang server as a push sees it: its properties, and the requests that pause, change and resume it.

Every request has a timeout; every error of a request is raised as `PushFailed`. Left out: which engines there are, and
what happens to a push when one of them fails (trainer/push/push.py).
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec

from trainer.config import Push

REQUEST_ERRORS = (OSError, HTTPException, msgspec.DecodeError)
"""Errors of a request to an engine that is down, starting or broken; URLError and timeouts are OSErrors."""
LOADING = "-loading"
"""Suffix of an engine's version name while its weights are being replaced by that version's, and if that fails."""
REFUSED = 400
"""The HTTP status by which SGLang 0.5.23 says that it cannot flush its caches now."""
MOMENT, LONGEST_MOMENT = 0.1, 2.0
"""Seconds for which a paused engine goes on to finish what keeps it from a flush: the first time, and at most."""
CALLS_SECONDS = 5.0
"""For how long one request waits for the calls of an engine with pipeline ranks."""


class PushFailed(Exception):
    """An engine did not do what it was asked. The text is the reason; it reads on from the engine's address.

    `lost`: the engine did not answer, so it may be away.
    """

    def __init__(self, reason: str, lost: bool = False):
        super().__init__(reason)
        self.lost = lost


class ServerInfo(msgspec.Struct, frozen=True):
    """An engine's answer to /server_info; fields that it leaves out have these defaults."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    max_req_input_len: int = 0
    """Tokens of the longest prompt that it accepts. 0: not known."""
    device: str | None = None
    """cuda | cpu | ..."""
    hicache_storage_backend: str | None = None
    """Where it stores cached prefixes outside of its process (HiCache L3). None: nowhere."""
    dtype: str = ""
    """auto | float32 | bfloat16 | ..."""
    enable_fp32_lm_head: bool | None = None
    """Whether its head computes in fp32 whatever `dtype` is. None: not known."""

    @property
    def head_float32(self) -> bool | None:
        """Whether its head computes in fp32. None: not known."""
        if self.enable_fp32_lm_head is None:
            return None
        return self.enable_fp32_lm_head or self.dtype in ("float32", "float")


def nobody_else() -> None:
    """Raise nothing: where no other trainer can have taken the run over."""


class PushTarget:
    """One server, and the requests that a push makes to it.

    `demand_owner` raises UserError when another trainer owns the run by now. It is called before the engine is paused,
    loaded or resumed.
    """

    def __init__(self, url: str, options: Push, demand_owner: Callable[[], None] = nobody_else):
        self.url, self.options, self.demand_owner = url.rstrip("/"), options, demand_owner
        self.about = ServerInfo()

    def describe(self) -> None:
        """Ask for its properties: up to `TRIES` times, a second apart, as the engine may be starting."""
        for left in reversed(range(self.options.TRIES)):
            try:
                self.about = msgspec.convert(self.ask("/server_info"), ServerInfo)
                return
            except (PushFailed, msgspec.ValidationError) as error:
                if not left:
                    raise PushFailed(str(error), isinstance(error, PushFailed) and error.lost) from error
                time.sleep(1)

    def served(self) -> str:
        """The version name that it reports; empty when it reports none."""
        return str(self.ask("/model_info").get("weight_version") or "")

    def hold(self) -> None:
        """Keep new calls waiting. Calls in flight are retracted, and continue with whatever weights there are then.

        The schedulers of pipeline ranks do not pause (SGLang 0.5.23): there, calls in flight go on. Told to retract,
        they might free the cache of a prompt that another stage computes.
        """
        self.demand_owner()
        self.ask("/pause_generation", {"mode": "retract" if self.about.pp_size == 1 else "in_place"})

    def pause(self) -> None:
        """Stop sampling, with nothing left that would keep an update from flushing its caches.

        PushFailed when a request fails, or `push.timeout_seconds` were not enough. Nothing has changed then, and the
        engine goes on. If its weights were of no version before, it stays paused, and its calls are aborted.
        """
        try:
            self.hold()
            self._finish_work()
        except PushFailed:
            self._go_on()
            raise

    def _finish_work(self) -> None:
        """Have an engine that is held finish what keeps it from a flush.

        This is copies of cached prefixes (HiCache) and grammars that compile. A paused engine finishes neither. So it
        goes on for moments, with the weights and the name that it has, until it is found without any. The calls of an
        engine with pipeline ranks end by themselves.
        """
        moment, end = MOMENT, time.monotonic() + self.options.timeout_seconds
        while not self._flushed():
            if time.monotonic() > end:
                raise PushFailed(self._restless())
            if self.about.pp_size == 1:
                self._go_on_for(moment)
                moment = min(2 * moment, LONGEST_MOMENT)

    def _go_on_for(self, seconds: float) -> None:
        """Resume for a moment. An engine whose weights are of no version goes on without its calls.

        They are aborted before. Those that came while it was paused are aborted afterwards, as no abort reaches them
        before. A call that ends within the moment keeps its tokens, of the loading name.
        """
        loading = self.served().endswith(LOADING)
        if loading:
            self.abort()
        self.resume()
        time.sleep(seconds)
        self.hold()
        if loading:
            self.abort()

    def _go_on(self) -> None:
        """Resume an engine whose pause has failed, unless its weights are of no version. If it stays paused, abort its
        calls."""
        self.demand_owner()  # a flush takes long enough for another trainer to have come
        with suppress(PushFailed):  # the failure of the pause is the one to report
            if not self.served().endswith(LOADING):
                self.resume()
                return
        self.abandon()

    def _flushed(self) -> bool:
        """Flush its caches. False: it refuses, as it has something to finish first.

        Of several data-parallel ranks, SGLang 0.5.23 returns the first answer; a rank refuses faster than it flushes.
        """
        self.demand_owner()
        wait = "" if self.about.pp_size == 1 else f"?timeout={CALLS_SECONDS:g}"
        try:
            self.load("/flush_cache" + wait, {})  # while its scheduler compiles kernels, it answers nothing
        except PushFailed as error:
            if isinstance(error.__cause__, HTTPError) and error.__cause__.code == REFUSED:
                return False
            raise
        return True

    def _restless(self) -> str:
        """Why a pause was given up."""
        work = "copying cached prefixes or compiling grammars" if self.about.pp_size == 1 else "its calls"
        limit = f"push.timeout_seconds = {self.options.timeout_seconds:g}"
        return f"did not finish {work} within {limit}, so its weights were not changed; set that higher"

    def resume(self) -> None:
        """Continue the calls that were retracted, and accept new ones."""
        self.ask("/continue_generation", {})

    def name(self, version: str) -> None:
        """Set the version name that it reports, whatever its weights are."""
        self.ask("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    @contextmanager
    def session(self) -> Iterator[None]:
        """Open the update session that updates in several requests need. Closes one that a dead trainer left open."""
        try:
            self.load("/begin_weight_update", {"selector": "all"})
        except PushFailed:
            self.load("/end_weight_update", {})
            self.load("/begin_weight_update", {"selector": "all"})
        try:
            yield
        except PushFailed:
            with suppress(PushFailed):  # the first failure is the one to report
                self.load("/end_weight_update", {})
            raise
        self.load("/end_weight_update", {})

    def clear_store(self) -> None:
        """Clear the cache outside of the engine: its keys contain no version, and `flush_cache` does not reach it."""
        if self.about.hicache_storage_backend:
            self.ask("/hicache/storage-backend/clear", {})

    def checksums(self) -> tuple[str, ...]:
        """The checksums of all weights, one for each different shard.

        Equal weights in the same split have equal checksums. PushFailed when the engine reports none.
        """
        ranks = self.load("/weights_checker", {"action": "checksum"}).get("ranks")
        if not ranks:  # engines without checksums must not pass for equal
            raise PushFailed("reports no checksums of its weights, so they cannot be compared with those of its peers")
        return tuple(sorted({str(rank["per_gpu_checksum"]) for rank in ranks}))

    def abandon(self) -> None:
        """Abort all calls of an engine that stays paused, so that they can be sampled elsewhere."""
        with suppress(PushFailed):  # an engine that is gone has no calls
            self.abort()

    def abort(self) -> None:
        """Abort all calls, but for those that came while it is paused."""
        self.ask("/abort_request", {"abort_all": True})

    def load(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Make a request that may take as long as loading weights takes (`push.timeout_seconds`)."""
        return self._once(path, body, self.options.timeout_seconds)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make a request that is answered at once (within `ANSWER_SECONDS`). Without a body it is a GET."""
        return self._once(path, body, self.options.ANSWER_SECONDS)

    def _once(self, path: str, body: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        """Make one request. PushFailed for errors, HTTP errors, and answers with `success: false`."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            request = Request(self.url + path, data, {"content-type": "application/json"})
            with urlopen(request, timeout=seconds) as response:
                text = response.read()
            answer: dict[str, Any] = msgspec.json.decode(text) if text.startswith(b"{") else {}
        except REQUEST_ERRORS as error:
            reason = error.read().decode(errors="replace")[:300] if isinstance(error, HTTPError) else error
            lost = not isinstance(error, HTTPError | msgspec.DecodeError)
            raise PushFailed(f"failed at {path} ({reason})", lost) from error
        if answer.get("success") is False:
            raise PushFailed(f"failed at {path} ({answer.get('message')})")
        return answer
