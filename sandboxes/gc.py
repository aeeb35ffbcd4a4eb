"""Nothing outlives its run: what dead owners left, on this machine and on Docker engines, is found and removed.

`harness run` does this at its start, each worker process of a cluster before its first attempt, `sandboxes gc` by hand.
An owner is judged by host, boot, process namespace, pid and start time, so neither a pid that was given out again nor
another machine's is mistaken. Left out: what cannot be judged from here; it is listed as such.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sandboxes.base import SandboxError
from sandboxes.docker.daemon import Engine, usual_endpoint
from sandboxes.docker.leftovers import Thing, orphans, remove, things
from sandboxes.local.leftovers import Found, collect, found

ENGINE_SECONDS = 300.0


@dataclass
class Seen:
    """What is there, or what was removed."""

    sandboxes: list[Found] = field(default_factory=list)
    """Directories and processes of this machine."""
    things: list[Thing] = field(default_factory=list)
    """Of Docker engines."""
    troubles: list[str] = field(default_factory=list)
    """Engines that could not be asked: a sentence each."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where to look."""

    engines: Sequence[str] | None = None
    """Addresses of Docker engines; None: the usual one, if there is one."""
    root: Path | None = None
    """Of the sandboxes without an engine."""


def reap(
    where: Where = Where(),  # noqa: B008 (frozen)
    *,
    dead_hosts: Collection[str] = (),
    bundles: bool = False,
) -> Seen:
    """Remove what dead owners left, and say what that was and what could not be asked."""

    async def removed(engine: Engine) -> list[Thing]:
        return await remove(engine, orphans(await things(engine), dead_hosts, bundles))

    seen = asyncio.run(_everywhere(where, removed))
    seen.sandboxes = collect(where.root)
    return seen


def look(where: Where = Where()) -> Seen:  # noqa: B008 (frozen)
    """What there is, whoever owns it."""
    seen = asyncio.run(_everywhere(where, things))
    seen.sandboxes = found(where.root)
    return seen


async def _everywhere(where: Where, ask: Callable[[Engine], Awaitable[list[Thing]]]) -> Seen:
    seen = Seen()

    async def one(address: str) -> None:
        try:
            async with asyncio.timeout(ENGINE_SECONDS):
                engine = await Engine.open(address)
                try:
                    seen.things += await ask(engine)
                finally:
                    await engine.close()
        except SandboxError as error:
            seen.troubles.append(str(error))
        except TimeoutError:
            seen.troubles.append(f"the Docker engine at {address} gives no answer for {ENGINE_SECONDS:g} s")

    try:
        addresses = usual_engines() if where.engines is None else where.engines
    except SandboxError as error:
        seen.troubles.append(str(error))
        return seen
    await asyncio.gather(*map(one, dict.fromkeys(addresses)))
    return seen


def usual_engines() -> list[str]:
    """Return the engine that is meant where none is named; none where there is none. EngineError when it is unclear."""
    endpoint = usual_endpoint()
    return [] if endpoint is None else [endpoint.address]
