"""Engines on the trainer's own devices: they give up their memory while a step is computed, and take it back after.

An engine dies when it is told to take back what it never gave up, and it does not say what it has given up. So its
version name says it, which outlives the trainer: `<version>-released` has neither weights nor cache,
`<version>-loading` has weights but no cache, `-moving` is somewhere between; a trainer that died there leaves an engine
that must be restarted, and the next one says so. Engines need `--enable-memory-saver`. Left out: the trainer's own
memory, of which only what is cached is freed.
"""

from collections.abc import Sequence

from trainer.push.target import LOADING, PushFailed, PushTarget

RELEASED, MOVING = "-released", "-moving"
WEIGHTS, CACHE = "weights", "kv_cache"


def release(engine: PushTarget) -> None:
    """Pause it and have it give up weights and cache. Repeated, it changes nothing."""
    served = engine.served()
    engine.pause()
    if served.endswith(RELEASED):
        return
    if served.endswith(LOADING):  # a push was interrupted: the cache is not there
        _move(engine, served, "release", [WEIGHTS])
    else:
        _check(served)
        _move(engine, served, "release", [CACHE, WEIGHTS])
    engine.name(_version(served) + RELEASED)


def take_back_weights(engine: PushTarget) -> None:
    """Room for weights, which are to be loaded then. The cache is not there afterwards, whatever was before."""
    served = engine.served()
    if served.endswith(LOADING):
        return
    if served.endswith(RELEASED):
        _move(engine, served, "resume", [WEIGHTS])
    else:
        _check(served)
        _move(engine, served, "release", [CACHE])


def take_back_cache(engine: PushTarget) -> None:
    """Room for the cache, after which the engine can go on."""
    served = engine.served()
    _move(engine, served, "resume", [CACHE])


def _check(served: str) -> None:
    if served.endswith(MOVING):
        raise PushFailed("was left while its memory moved, so what it holds is unknown; restart it")


def _move(engine: PushTarget, served: str, verb: str, tags: Sequence[str]) -> None:
    engine.name(_version(served) + MOVING)
    engine.load(f"/{verb}_memory_occupation", {"tags": list(tags)})


def _version(served: str) -> str:
    for suffix in (RELEASED, MOVING, LOADING):
        served = served.removesuffix(suffix)
    return served
