"""New weights into the running engines, by a shared directory.

Every replica is paused first, so that none samples new weights while another still serves old ones; requests in flight
are retracted and go on afterwards with the new weights (the engine notes which tokens came from which version). Pushing
the same version twice does no harm. Left out: in-band and collective transfers, replacing a failed replica.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec

from proxy.pool.errors import UserError
from trainer.config import Push

TROUBLE = (OSError, HTTPException, msgspec.DecodeError)
"""What an engine that is down, starting or broken makes of a request; URLError and timeouts are OSErrors."""


@dataclass(frozen=True)
class Weights:
    """What the engines are to serve, and under which name."""

    version: str
    directory: Path


def push(weights: Weights, options: Push) -> float:
    """Bring every engine to these weights. Returns the seconds during which they were paused."""
    if not options.engines:
        return 0.0
    engines = [_Engine(url, options) for url in options.engines]
    started = time.perf_counter()
    with ThreadPoolExecutor(len(engines)) as threads:
        try:
            _each(threads, engines, _Engine.pause)
            _each(threads, engines, lambda engine: engine.load(weights))
        except UserError:
            for engine in engines:
                with suppress(UserError):  # the first failure is the one to tell
                    engine.go_on()
            raise
        _each(threads, engines, _Engine.go_on)
    return time.perf_counter() - started


def lost(weights: Weights, options: Push) -> list[str]:
    """The engines that answer and serve something else: they were started anew since the push."""
    found = []
    for engine in (_Engine(url, options) for url in options.engines):
        with suppress(*TROUBLE):  # one that does not answer yet is asked again later
            if engine.served() != weights.version:
                found.append(engine.url)
    return found


def _each(threads: ThreadPoolExecutor, engines: Sequence["_Engine"], do: Callable[["_Engine"], None]) -> None:
    for done in [threads.submit(do, engine) for engine in engines]:
        done.result()


class _Engine:
    """The requests of one push to one SGLang server."""

    def __init__(self, url: str, options: Push):
        self.url, self.options = url.rstrip("/"), options

    def pause(self) -> None:
        self._ask("/pause_generation", {"mode": "retract"})

    def load(self, weights: Weights) -> None:
        """Load and verify; UserError when the engine then serves another version."""
        # The update also drops the KV caches of the old weights and fails where it cannot; /flush_cache would do the
        # same again and take half a second.
        name = {"model_path": str(weights.directory.resolve()), "weight_version": weights.version}
        answer = self._ask("/update_weights_from_disk", {**name, "flush_cache": True})
        served = self.served()
        if not answer.get("success") or served != weights.version:
            raise UserError(
                f"engine {self.url} serves weights {served!r} instead of {weights.version!r} "
                f"({answer.get('message')}); correct it and start the trainer again, which repeats the push"
            )

    def served(self) -> object:
        return self._once("/model_info", None).get("weight_version")

    def go_on(self) -> None:
        self._ask("/continue_generation", {})

    def _ask(self, path: str, body: dict[str, str | bool] | None) -> dict[str, object]:
        for _ in range(self.options.tries - 1):
            try:
                return self._once(path, body)
            except TROUBLE:
                time.sleep(1)
        try:
            return self._once(path, body)
        except TROUBLE as error:
            reason = error.read().decode(errors="replace")[:200] if isinstance(error, HTTPError) else error
            raise UserError(
                f"engine {self.url} failed at {path} ({reason}); bring it up and start the trainer again, which "
                "repeats the push"
            ) from error

    def _once(self, path: str, body: dict[str, str | bool] | None) -> dict[str, object]:
        data = None if body is None else msgspec.json.encode(body)
        request = Request(self.url + path, data, {"content-type": "application/json"})
        with urlopen(request, timeout=self.options.timeout_seconds) as response:
            text = response.read()
        return msgspec.json.decode(text) if text.startswith(b"{") else {}
