"""Engines on the trainer's own devices: they free their memory while a step is computed, and take it back afterwards.

SGLang 0.5.23 dies when it is told to take back memory that it has not freed, and it does not report what it has freed.
So the engine's version name records it; the name outlives the trainer. `<version>-released`: neither weights nor cache.
`<version>-loading`: weights but no cache. `<version>-moving`: memory is being freed or taken back; if the trainer dies
then, the engine must be restarted, and the next push says so. Engines need `--enable-memory-saver`. Left out: the
trainer's own memory, of which only torch's cache is freed.
"""

from collections.abc import Sequence

from trainer.push.target import LOADING, PushFailed, PushTarget

RELEASED, MOVING = "-released", "-moving"
WEIGHTS, CACHE = "weights", "kv_cache"


def pause(engine: PushTarget) -> str:
    """Pause the engine, whatever memory it has, and return its version name. It dies if it goes on without a cache."""
    served = engine.served()
    if served.endswith((RELEASED, MOVING, LOADING)):
        engine.hold()
    else:
        engine.pause()
    return served


def release(engine: PushTarget) -> None:
    """Pause the engine and make it free its weights and cache. Repeating it changes nothing."""
    served = pause(engine)
    if served.endswith(RELEASED):
        return
    if served.endswith(LOADING):  # a push was interrupted, and the cache is freed already
        _move(engine, served, "release", [WEIGHTS])
    else:
        _check(served)
        _move(engine, served, "release", [CACHE, WEIGHTS])
    engine.name(_version(served) + RELEASED)


def take_back_weights(engine: PushTarget) -> None:
    """Take back memory for weights, to load them next. The engine has no cache afterwards, whatever its state was."""
    served = engine.served()
    if served.endswith(LOADING):
        return
    if served.endswith(RELEASED):
        _move(engine, served, "resume", [WEIGHTS])
    else:
        _check(served)
        _move(engine, served, "release", [CACHE])


def take_back_cache(engine: PushTarget) -> None:
    """Take back memory for the cache, after which the engine can resume."""
    served = engine.served()
    _move(engine, served, "resume", [CACHE])


def _check(served: str) -> None:
    """PushFailed when the engine's memory is in an unknown state."""
    if served.endswith(MOVING):
        raise PushFailed("was interrupted while it freed or took back memory, so its state is unknown; restart it")


def _move(engine: PushTarget, served: str, verb: str, tags: Sequence[str]) -> None:
    """Free (`release`) or take back (`resume`) memory, under the name that marks the state as unknown."""
    engine.name(_version(served) + MOVING)
    engine.load(f"/{verb}_memory_occupation", {"tags": list(tags)})


def _version(served: str) -> str:
    """The version name without the suffixes."""
    for suffix in (RELEASED, MOVING, LOADING):
        served = served.removesuffix(suffix)
    return served
