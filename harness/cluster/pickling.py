"""Sends a run's context to a node: what belongs to one process is named there instead of sent.

The node opens the pool at its URL and makes its own sandboxes with the function that came along. An attempt's logs go
back with the report. Secrets travel as Ray moves all data: the pool's password, the admin key and a judge's key.
Whoever reaches the cluster's ports can read them.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from harness.async_pool import AsyncPool
from harness.rollout.context import RunContext, StageSlots
from proxy.pool.database import open_pool
from proxy.pool.errors import PoolError, UserError
from proxy.pool.rollouts.groups import Outcome
from sandboxes.base import Sandboxes

MakeSandboxes = Callable[[], Sandboxes]


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """The result of an attempt on a node."""

    node: str
    outcome: Outcome | None = None
    error: UserError | PoolError | None = None
    """An error that ends the run, as it does without a cluster: another node would fail in the same way."""
    logs: dict[str, bytes]


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, context: RunContext):
        super().__init__(file)
        self._context = context

    def persistent_id(self, thing: Any) -> str | None:
        mine = self._context  # pickled by name: what belongs to this process
        left_behind = {"pool": mine.pool, "sandboxes": mine.sandboxes, "logs": mine.logs, "slots": mine.slots}
        return next((name for name, part in left_behind.items() if part is thing), None)


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, here: dict[str, Any]):
        super().__init__(file)
        self._here = here

    def persistent_load(self, name: str) -> Any:
        return self._here[name]


def pack(context: RunContext) -> bytes:
    """Pickle a context without what belongs to this process."""
    file = io.BytesIO()
    watch = context.integrity and replace(context.integrity, judges=None)
    _Packer(file, context).dump(replace(context, remote_attempt=None, scorer=None, integrity=watch))
    return file.getvalue()


@dataclass(frozen=True, kw_only=True)
class NodeSetup:
    """What a worker process needs once for all attempts of a run. Hashable, as the key of the process's cache."""

    pool: str
    """URL of the pool, with the password."""
    make_sandboxes: MakeSandboxes

    def opened(self) -> dict[str, Any]:
        """Make the fields that were left behind, except those of each attempt (sandboxes, logs).

        PoolError when the pool cannot be reached from here.
        """
        return {"pool": AsyncPool(open_pool(self.pool)), "slots": StageSlots(starting=1, agents=1, verifying=1)}


def unpack(packed: bytes, here: dict[str, Any]) -> RunContext:
    """Rebuild the context in this process."""
    context: RunContext = _Unpacker(io.BytesIO(packed), here).load()
    return context
