"""The interface for parts of a container besides image and profile: access to the proxy, agents' bundles."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandboxes.base import Spec


@dataclass(frozen=True, kw_only=True)
class Supply:
    """The part of a container that one supplier adds. At most one of them names a main process and a network."""

    main: Sequence[str] = ()
    """The main process, instead of one that sleeps. Runs as the profile's root; the sandbox ends with it."""
    mounts: Sequence[Mapping[str, Any]] = ()
    """Mounts in the format of the daemon's API: Type, Source, Target, ReadOnly."""
    env: Mapping[str, str] = field(default_factory=dict)
    network: str = ""
    """Network of the daemon to join. Empty: none. Ignored where the spec has the full network."""
    ready: "Callable[[str, float], Awaitable[None]] | None" = None
    """Returns when the main process works. Called with the container's name once it runs, and with the moment before
    which what it says is of an earlier start, in seconds since the epoch."""
    model_url: str = ""
    bundles: str = ""


class Supplier(Protocol):
    """Adds one part to every container."""

    async def supply(self, sandbox: str, spec: Spec) -> Supply:
        """Return the part for the sandbox of this id. SandboxError when that fails."""

    async def release(self, sandbox: str) -> None:
        """Release what the sandbox used: it is gone, or was never started. May be called more than once."""


def merge_supplies(supplies: Sequence[Supply]) -> Supply:
    """Merge the parts of several suppliers into one."""
    return Supply(
        main=next((supply.main for supply in supplies if supply.main), ()),
        mounts=[mount for supply in supplies for mount in supply.mounts],
        env={name: value for supply in supplies for name, value in supply.env.items()},
        network=next((supply.network for supply in supplies if supply.network), ""),
        ready=next((supply.ready for supply in supplies if supply.ready), None),
        model_url=next((supply.model_url for supply in supplies if supply.model_url), ""),
        bundles=next((supply.bundles for supply in supplies if supply.bundles), ""),
    )
