"""Where a run's attempts are made (in this process, or on the nodes of a Ray cluster), and in what sandboxes."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from harness.agents.install import agents_directory
from harness.rollout import Bench
from harness.scaleout.cluster import RayOptions, on_cluster
from harness.settings import Settings
from sandboxes.base import Sandboxes
from sandboxes.process import ProcessSandboxes


def add_options(run: argparse.ArgumentParser) -> None:
    group = run.add_argument_group("scale-out (docs/runs.md)")
    group.add_argument("--executor", choices=("local", "ray"), help="where attempts are made (local)")
    group.add_argument(
        "--ray-address", metavar="HOST:PORT", help="of the cluster's head (auto: RAY_ADDRESS, or this node's)"
    )
    group.add_argument("--attempt-cpus", type=float, help="of a node, while an attempt is made there (1)")


def make_sandboxes() -> Sandboxes:
    """In this process, or in one of a node."""
    return ProcessSandboxes(bundles=agents_directory())


@contextmanager
def placed(settings: Settings, bench: Bench) -> Iterator[Bench]:
    """The bench with its attempts where they are to be made. UserError when they cannot be made there."""
    if settings.executor == "local":
        yield bench
        return
    options = RayOptions(address=settings.ray_address, cpus=settings.attempt_cpus)
    with on_cluster(options, bench, make_sandboxes) as elsewhere:
        yield elsewhere
