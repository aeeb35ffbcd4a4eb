"""Where a run's attempts are made (in this process, or on the nodes of a Ray cluster), and in what sandboxes."""

import argparse
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

from harness.backends import Backend
from harness.metrics import shown
from harness.rollout import Bench
from harness.scaleout.cluster import RayOptions, on_cluster
from harness.settings import Settings
from sandboxes.base import Sandboxes
from sandboxes.hosts import HostOptions, Hosts
from sandboxes.metrics import Metrics


def add_options(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("scale-out (docs/runs.md)")
    group.add_argument("--executor", choices=("local", "ray"), help="where attempts are made (local)")
    group.add_argument(
        "--ray-address", metavar="HOST:PORT", help="of the cluster's head (auto: RAY_ADDRESS, or this node's)"
    )
    group.add_argument("--attempt-cpus", type=float, help="of a node, while an attempt is made there (1)")
    run.add_argument("--metrics-port", type=int, help="show the sandboxes' metrics at 127.0.0.1:PORT/metrics")
    run.add_argument("--metrics-file", metavar="PATH", help="write them to this file")


def make_sandboxes(backend: Backend) -> Hosts:
    """In this process, or in one of a node."""

    async def opened(_: str) -> Sandboxes:
        return await backend.open()

    return Hosts([HostOptions(address=backend.kind)], opened, kind=backend.kind)


@contextmanager
def placed(settings: Settings, bench: Bench, backend: Backend) -> Iterator[Bench]:
    """The bench with its attempts where they are to be made. UserError when they cannot be made there."""
    if settings.executor == "local":
        yield bench
        return
    options = RayOptions(address=settings.ray_address, cpus=settings.attempt_cpus)
    with on_cluster(options, bench, partial(make_sandboxes, backend)) as elsewhere:
        yield elsewhere


@asynccontextmanager
async def watched(settings: Settings, sandboxes: Sandboxes) -> AsyncIterator[None]:
    """The run's sandboxes with their metrics on show; closed at the end, with all that they share."""
    metrics = sandboxes.metrics if isinstance(sandboxes, Hosts) else Metrics()
    file = None if settings.metrics_file is None else Path(settings.metrics_file)
    try:
        async with shown(metrics.text, settings.metrics_port, file):
            yield
    finally:
        await sandboxes.close()
