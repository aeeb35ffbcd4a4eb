"""Decides where a run's attempts run (in this process or on the nodes of a Ray cluster) and makes their sandboxes."""

import argparse
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from harness.cluster.ray import RayOptions, on_cluster
from harness.monitor.metrics import METRICS, shown
from harness.monitor.rule_metrics import RuleMetrics
from harness.rollout.context import RunContext
from harness.settings import Settings
from harness.setup.sandbox_choice import Backend
from proxy.pool.errors import UserError
from sandboxes.base import Sandboxes
from sandboxes.docker.backend import DockerSandboxes
from sandboxes.docker.warm_pool import WarmPool
from sandboxes.fleet import HostOptions, Hosts, parse_host
from sandboxes.gc import SearchScope, remove_leftovers, usual_daemons
from sandboxes.metrics import SandboxMetrics


def add_options(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("scale-out (docs/runs.md)")
    group.add_argument(
        "--ray",
        metavar="HOST:PORT",
        help="run attempts on this Ray cluster; auto: RAY_ADDRESS, or this node's",
    )
    group.add_argument(
        "--docker", action="append", metavar="HOST", help="Docker daemon as ADDRESS[=WEIGHT[/LIMIT]]; repeatable"
    )
    group.add_argument(
        "--runtime", action="append", metavar="PROFILE=NAME", help="runtime of containers: strict=runsc, say"
    )
    group.add_argument("--warm", type=int, help="spare containers kept ready for each kind of sandbox")
    group.add_argument("--metrics-port", type=int, help="serve the sandboxes' metrics at 127.0.0.1:PORT/metrics")


@dataclass(frozen=True, kw_only=True)
class SandboxMaker:
    """Makes a run's sandboxes, in this process or in a process of a node."""

    backend: Backend
    hosts: tuple[HostOptions, ...] = ()
    """Docker daemons. Empty: the usual one."""
    warm: int = 0

    def __call__(self) -> Hosts:
        kind = self.backend.kind
        usual = next(iter(usual_daemons()), kind) if kind == "docker" else kind
        return Hosts(self.hosts or (HostOptions(address=usual),), self._open, kind=kind)

    async def _open(self, address: str) -> Sandboxes:
        socket = self.backend.socket
        near = self.backend if socket is None or socket.is_socket() else replace(self.backend, socket=None)
        sandboxes = await near.open(address if self.hosts else "")
        return WarmPool(sandboxes, self.warm) if self.warm and isinstance(sandboxes, DockerSandboxes) else sandboxes


def docker_hosts(settings: Settings) -> tuple[HostOptions, ...]:
    """The Docker daemons that a run names. UserError when one is malformed or does not fit the kind of sandbox."""
    if settings.docker and settings.sandbox not in ("auto", "docker"):
        raise UserError(f"--docker does not go with --sandbox {settings.sandbox}; leave one of them out")
    try:
        return tuple(parse_host(text) for text in settings.docker)
    except ValueError as error:
        raise UserError(f"{error}; correct --docker") from error


@contextmanager
def reaped(daemons: Sequence[str], console: Console) -> Iterator[None]:
    """Remove what killed runs left, and again at the end: a daemon may have been creating something meanwhile."""
    where = SearchScope(daemons=daemons or None)
    for trouble in remove_leftovers(where).troubles:
        console.print(f"not cleaned up: {trouble}", highlight=False)
    yield
    remove_leftovers(where)


@contextmanager
def placed(settings: Settings, context: RunContext, maker: SandboxMaker) -> Iterator[RunContext]:
    """Give the context whose attempts run where the settings say. UserError when they cannot run there."""
    if settings.ray is None:
        yield context
        return
    options = RayOptions(address=settings.ray)
    with on_cluster(options, context, replace(maker, warm=0)) as on_nodes:
        yield on_nodes


@asynccontextmanager
async def with_metrics(
    port: int | None, sandboxes: Sandboxes, run_dir: Path, rules: RuleMetrics
) -> AsyncIterator[None]:
    """Write metrics of sandboxes and rules into the run directory, and serve them on a port.

    At the end close the sandboxes.
    """
    metrics = sandboxes.metrics if isinstance(sandboxes, Hosts) else SandboxMetrics()
    try:
        async with shown(lambda: metrics.text() + rules.text(), port, run_dir / METRICS):
            yield
    finally:
        await sandboxes.close()
