"""What a container gets besides image and profile: a way to the proxy, agents' bundles. The seam to their makers."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sandboxes.base import Spec


@dataclass(frozen=True, kw_only=True)
class Supply:
    """One maker's part of a container. At most one of them names the main process and the network."""

    main: Sequence[str] = ()
    """The main process, in place of one that sleeps. Runs as root of the profile; the sandbox ends with it."""
    mounts: Sequence[Mapping[str, Any]] = ()
    """As the daemon's API has them: Type, Source, Target, ReadOnly."""
    env: Mapping[str, str] = field(default_factory=dict)
    network: str = ""
    """The daemon's network to join in place of none; not asked for where the spec has the full network."""
    ready: "Callable[[str], Awaitable[None]] | None" = None
    """Called with the container's name once it runs; returns when the main process does what it is for."""
    model_url: str = ""
    bundles: str = ""


class Supplier(Protocol):
    """Makes one part of every container."""

    async def supply(self, sandbox: str, spec: Spec) -> Supply:
        """What the sandbox of this id is to have. SandboxError when it cannot be had."""

    async def release(self, sandbox: str) -> None:
        """The sandbox is gone, or was never started. May be called again."""


def merge_supplies(supplies: Sequence[Supply]) -> Supply:
    """Several makers' parts as one."""
    return Supply(
        main=next((supply.main for supply in supplies if supply.main), ()),
        mounts=[mount for supply in supplies for mount in supply.mounts],
        env={name: value for supply in supplies for name, value in supply.env.items()},
        network=next((supply.network for supply in supplies if supply.network), ""),
        ready=next((supply.ready for supply in supplies if supply.ready), None),
        model_url=next((supply.model_url for supply in supplies if supply.model_url), ""),
        bundles=next((supply.bundles for supply in supplies if supply.bundles), ""),
    )
