"""New weights into the running engines: one verb, three ways.

A push pauses every engine, so that none samples new weights while another still serves old ones; calls in flight are
retracted and go on afterwards (the engine notes which tokens came from which version). While an engine's weights change
it names a version that no run knows, `<version>-loading`. One that fails then stays paused and keeps that name, so
nothing that it might sample passes for anything else, the proxy sends it no calls, and `push_again` repairs it. The
others go on. Pushing the same version twice does no harm. Left out: starting engines, choosing which one samples.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

from proxy.pool.errors import UserError
from trainer.config import Push
from trainer.push import colocated, disk, distributed, tensor
from trainer.push.engine_group import EngineGroup
from trainer.push.target import LOADING, PushFailed, PushTarget
from trainer.push.weights import Weights

__all__ = ["PushResult", "Weights", "push", "push_again", "release"]

WAYS: dict[str, Callable[[PushTarget, Weights], None]] = {
    "disk": disk.send,
    "tensor": tensor.send,
    "distributed": distributed.send,
}
PAUSED = "-paused"
"""What an engine's version ends with that has the weights of this version, and did not go on."""
LOOPBACK = ("127.", "localhost", "[::1]")


@dataclass(frozen=True)
class PushResult:
    """How a push went."""

    seconds: float = 0.0
    """How long the engines were paused."""
    ways: dict[str, str] = field(default_factory=dict)
    """Engine -> way, of those that have the weights now."""
    failed: dict[str, str] = field(default_factory=dict)
    """Engine -> why it has not."""
    notes: tuple[str, ...] = ()
    """What was done otherwise than configured."""

    def text(self) -> str:
        """For the log."""
        names = sorted(set(self.ways.values()))
        without = "".join(f"; without {url}, which {reason}" for url, reason in self.failed.items())
        return f"to {len(self.ways)} engines ({' '.join(names) or 'none'}), paused {self.seconds:.3f} s{without}"


def push(weights: Weights, options: Push) -> PushResult:
    """Bring every engine to these weights. UserError when fewer than `push.quorum` could be brought there."""
    if not options.engines:
        return PushResult()
    done = _push(weights, [PushTarget(url, options) for url in options.engines])
    if len(done.ways) < options.quorum:
        reasons = "; ".join(f"engine {url} {reason}" for url, reason in done.failed.items())
        raise UserError(
            f"{len(done.ways)} of {len(options.engines)} engines serve {weights.version} and push.quorum is "
            f"{options.quorum}: {reasons}; bring them up and start the trainer again, which repeats the push"
        )
    return done


def push_again(weights: Weights, options: Push) -> PushResult | None:
    """Bring the engines there that answer and serve something else: they failed, or were started anew.

    None when there are none. Those that serve these weights go on meanwhile.
    """
    served = EngineGroup(PushTarget(url, options) for url in options.engines).each(PushTarget.served)
    lost = [engine for engine, version in served.items() if version != weights.version]
    if not lost:
        return None
    return _push(weights, lost, [engine for engine in served if engine not in lost])


def release(options: Push) -> None:
    """Before a step is computed on the engines' own devices: pause them and have them give up their memory.

    UserError when one fails, since the memory is needed.
    """
    crew = EngineGroup(PushTarget(url, options) for url in options.engines)
    crew.each(colocated.release)
    for url, reason in crew.failed.items():
        raise UserError(f"engine {url} {reason}, so its memory is not free for the step; restart it and the trainer")


def _push(weights: Weights, engines: Sequence[PushTarget], standing: Sequence[PushTarget] = ()) -> PushResult:
    weights.parts()  # what is not there must not pause anybody
    crew = EngineGroup(engines)
    crew.each(PushTarget.describe)
    ways = {engine: _choose(engine) for engine in crew.engines}
    started = time.perf_counter()
    crew.each(PushTarget.pause)
    crew.each(lambda engine: _load(engine, weights, WAYS[ways[engine][0]]))
    if standing:
        EngineGroup(standing).each(PushTarget.describe)
    crew.agree(standing)
    crew.each(lambda engine: _finish(engine, weights.version))
    seconds = time.perf_counter() - started if crew.engines else 0.0
    notes = tuple(note for engine in crew.engines if (note := ways[engine][1]))
    return PushResult(seconds, {engine.url: ways[engine][0] for engine in crew.engines}, crew.failed, notes)


def _load(engine: PushTarget, weights: Weights, send: Callable[[PushTarget, Weights], None]) -> None:
    """New weights under the version's loading name. An engine that fails is left as it is, paused and without calls."""
    try:
        if engine.options.colocated:
            colocated.take_back_weights(engine)
        engine.name(weights.version + LOADING)
        send(engine, replace(weights, version=weights.version + LOADING))
        engine.clear_store()
    except BaseException:  # whatever it was, the engine's weights are of no version now
        engine.abandon()
        raise


def _finish(engine: PushTarget, version: str) -> None:
    """The version's own name, and on with the calls; one that fails here is left as above."""
    try:
        if engine.options.colocated:
            colocated.take_back_cache(engine)
        engine.name(version)
        if (served := engine.served()) != version:
            raise PushFailed(f"serves weights {served!r} instead of {version!r}")
        _go_on(engine, version)
    except PushFailed:
        engine.abandon()
        raise


def _go_on(engine: PushTarget, version: str) -> None:
    """One that does not must not name the version, or it would pass for one that serves it."""
    try:
        engine.go_on()
    except PushFailed:
        with suppress(PushFailed):
            engine.name(version + PAUSED)
        raise


def _choose(engine: PushTarget) -> tuple[str, str]:
    """The way to this engine, and what is to be said about it when it is not the configured one."""
    wanted, about = engine.options.way, engine.about
    alone = about.dp_size == about.pp_size == 1
    if wanted == "auto":
        near = engine.options.colocated or (urlsplit(engine.url).netloc.startswith(LOOPBACK))
        return ("disk" if near or not alone else "distributed"), ""
    if wanted == "disk" or alone:
        return wanted, ""
    return "disk", (
        f"engine {engine.url} has dp_size {about.dp_size} and pp_size {about.pp_size}, where SGLang takes no weights "
        f"by push.way = {wanted}; it gets them by disk"
    )
