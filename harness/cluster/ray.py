"""`--ray`: runs attempts on the nodes of a Ray cluster, driven by this process.

One attempt is one Ray task, so Ray places it by the node's free CPUs and memory. This process alone decides on
admission, the order of tasks, retries and outcomes. The attempts of a node that dies are closed as interrupted, which
revokes their keys, and run again on other nodes under new keys. An attempt that failed on a node is retried on another
one, if there is one. The run brings the packages harness, proxy and sandboxes to the nodes. Their dependencies
(docs/runs.md, "Ray"), and an agent for process sandboxes, must be installed there.

Left out: autoscaling, Ray's dashboard, and Ray's own retries, which would reuse a key that is revoked.
"""

import asyncio
import ipaddress
import logging
import os
import socket
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from harness.cluster.node import attempt_here, clean_up
from harness.cluster.pickling import MakeSandboxes, NodeReport, NodeSetup, pack
from harness.cluster.task_directories import directories_of, pack_directories
from harness.rollout.context import Cancellation, RolloutJob, RunContext
from proxy.pool.errors import UserError
from proxy.pool.rollouts.attempts import Ending, close_lost, still_open
from proxy.pool.rollouts.failures import treatment
from proxy.pool.rollouts.groups import OpenRollout, Outcome

REACH_SECONDS = 10
CANCEL_SECONDS = 30
SETTLE_SECONDS = 120
LOOK_SECONDS = 10
PARCELS = 16
"""Number of tasks whose directories stay in the cluster's object store for further attempts."""
TRAVELLING = ("harness", "proxy", "sandboxes")
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The settings of a run on a cluster."""

    address: str = "auto"
    """HOST:PORT of the head node; auto: RAY_ADDRESS, or the cluster that this machine is a node of."""
    cpus: float = 1.0
    """CPUs of a node that an attempt takes while it runs. The task's memory limit is taken besides."""


@contextmanager
def on_cluster(options: RayOptions, context: RunContext, make_sandboxes: MakeSandboxes) -> Iterator[RunContext]:
    """Give the context whose attempts run on the cluster's nodes. UserError when the cluster cannot be used."""
    pool = context.pool.blocking
    if pool.dialect == "sqlite":
        raise UserError(
            f"the pool {pool.name} is a file of this machine, which a cluster's nodes cannot write; "
            "name a postgresql:// URL with --pool, or leave out --ray"
        )
    ray = _connected(options)
    try:
        cluster = Cluster(ray, options, NodeSetup(pool=pool.url, make_sandboxes=make_sandboxes))
        cluster.check(context.url)
        cluster.clean_up()
        yield replace(context, remote_attempt=cluster.attempt)
    finally:
        ray.shutdown()


def _connected(options: RayOptions) -> Any:
    if find_spec("ray") is None:
        raise UserError("--ray needs Ray; pip install 'blackforge[ray]'")
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    import ray  # importing it takes a second, so only runs on a cluster do

    address = os.environ.get("RAY_ADDRESS", "auto") if options.address == "auto" else options.address
    if address != "auto":
        _reachable(address)
    modules = [
        path for name in TRAVELLING if (spec := find_spec(name)) for path in spec.submodule_search_locations or ()
    ]
    try:
        ray.init(
            address=address,
            namespace="blackforge",
            runtime_env={"py_modules": modules, "excludes": ["__pycache__"]},
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:  # none there, other versions, bad address
        raise UserError(
            f"the Ray cluster {address} cannot be used ({_first_line(error)}); start one with `ray start --head`, "
            "or correct --ray"
        ) from error
    return ray


def _reachable(address: str) -> None:
    """Check that the head node answers, since Ray itself would wait for minutes. UserError when it does not."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise UserError(f"--ray is HOST:PORT of the cluster's head node, or auto, not: {address}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"the Ray cluster {address} does not answer ({error}); start it with `ray start --head`, or correct --ray"
        ) from error


class Cluster:
    """The nodes of a Ray cluster, and on which of them each rollout has failed."""

    def __init__(self, ray: Any, options: RayOptions, station: NodeSetup):
        self._ray, self._options = ray, options
        self._station = ray.put(station)
        self._attempt = ray.remote(max_retries=0)(attempt_here)
        self._clean_up = ray.remote(max_retries=0, num_cpus=0)(clean_up)
        self._failed_on: dict[int, set[str]] = defaultdict(set)
        self._parcels: OrderedDict[tuple[str, ...], Any] = OrderedDict()

    def check(self, url: str) -> None:
        """Check that every node can reach the proxy. UserError when one cannot."""
        host = urlsplit(url).hostname or ""
        here = self._ray.util.get_node_ip_address()
        far = sorted({node["NodeManagerAddress"] for node in self._nodes()} - {here, "127.0.0.1"})
        if far and _is_loopback(host):
            raise UserError(
                f"the proxy {url} is on this machine's loopback, where the Ray node {far[0]} cannot reach "
                "it; start `proxy serve` on an address of the network and name it with --proxy"
            )

    def clean_up(self) -> None:
        """Make every node remove what dead processes left there."""
        self._ray.wait(pending := self._cleaning(), num_returns=len(pending), timeout=SETTLE_SECONDS)

    async def attempt(self, context: RunContext, job: RolloutJob) -> Outcome:
        """Make one attempt on a node, if possible on one where this rollout has not failed."""
        rollout = job.rollout
        wants = {"CPU": self._options.cpus, "memory": float((job.task.limits.memory_mb or 0) << 20)}
        avoided = self._avoided(rollout, wants)
        placed = self._attempt.options(**_placement(wants, avoided))
        running = placed.remote(self._station, pack(context), rollout, job.agent, await self._parcel(rollout))
        try:
            report = await self._end_of(running, wants, avoided)
        except asyncio.CancelledError:
            await self._cancel(running, context, rollout, job.cancellation)
            raise
        except self._ray.exceptions.RuntimeEnvSetupError as error:
            raise UserError(f"a Ray node cannot take the harness ({_first_line(error)}); see its Ray logs") from error
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ImportError):
                raise UserError(
                    f"a Ray node lacks what the harness is built on ({error.cause}); in a checkout on every node: "
                    "pip install -c constraints.txt -e '.[ray,postgres]'"
                ) from error
            return await self._lost(context, rollout, repr(error.cause))
        except (self._ray.exceptions.RayError, _Stranded) as error:  # no memory or disk is left there, say
            return await self._lost(context, rollout, _first_line(error))
        return self._reported(context, rollout, report)

    async def _parcel(self, rollout: OpenRollout) -> Any:
        """Put the task's directories into the object store, once for the latest PARCELS tasks. None without any."""
        directories = directories_of(rollout.task)
        if not directories:
            return None
        key = (rollout.task.get("digest", ""), *directories)
        if key not in self._parcels:
            self._parcels[key] = self._ray.put(await asyncio.to_thread(pack_directories, directories))
        self._parcels.move_to_end(key)
        while len(self._parcels) > PARCELS:
            self._parcels.popitem(last=False)
        return self._parcels[key]

    def _reported(self, context: RunContext, rollout: OpenRollout, report: NodeReport) -> Outcome:
        for name, log in report.logs.items():
            (context.logs / name).parent.mkdir(parents=True, exist_ok=True)
            (context.logs / name).write_bytes(log)
        if report.error is not None:
            raise report.error
        assert report.outcome is not None
        failure = report.outcome.failure
        if failure is not None and failure != "outage" and treatment(failure) == "retry":
            self._failed_on[rollout.rollout_id].add(report.node)
        return report.outcome

    async def _end_of(self, running: Any, wants: dict[str, float], avoided: set[str]) -> NodeReport:
        """Wait for the report. _Stranded or UserError when no node is left that the attempt could run on."""
        ending = asyncio.wrap_future(running.future())
        while not (await asyncio.wait([ending], timeout=LOOK_SECONDS))[0]:
            able = set(self._able(wants))
            if not able - avoided:  # Ray would wait for another node for ever
                self._ray.cancel(running, force=True)
                raise _Stranded("no other node is left") if able else self._nowhere(wants)
        report: NodeReport = ending.result()
        return report

    def _able(self, wants: dict[str, float]) -> list[str]:
        """The ids of the nodes that are large enough for an attempt."""
        return [
            node["NodeID"]
            for node in self._nodes()
            if all(node["Resources"].get(name, 0.0) >= amount for name, amount in wants.items())
        ]

    def _nowhere(self, wants: dict[str, float]) -> UserError:
        return UserError(
            f"no node of the Ray cluster has {wants['CPU']:g} CPUs and {wants['memory'] / (1 << 20):g} MB for an "
            "attempt; add a node, or lower the task's limits.memory_mb, and repeat the command"
        )

    def _avoided(self, rollout: OpenRollout, wants: dict[str, float]) -> set[str]:
        """The nodes on which the rollout has failed, if there are others. UserError when no node is large enough."""
        able = set(self._able(wants))
        if not able:
            raise self._nowhere(wants)
        failed = self._failed_on.pop(rollout.rollout_id, set()) & able
        if not able - failed:
            return set()
        if failed:
            self._failed_on[rollout.rollout_id] = failed
        return failed

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    async def _cancel(
        self, running: Any, context: RunContext, rollout: OpenRollout, cancellation: Cancellation
    ) -> None:
        """Let the node end its agent and close its attempt. Kill the worker if that takes more than CANCEL_SECONDS."""
        if cancellation.reason is not None:  # the node does not know this reason, so it is written here
            detail = "the attempt was called off while it ran"
            await self._close(context, rollout, Ending(failure=cancellation.reason, detail=detail))
        self._ray.cancel(running)
        try:
            await asyncio.wait_for(asyncio.wrap_future(running.future()), CANCEL_SECONDS)
        except TimeoutError:
            self._ray.cancel(running, force=True)
        except self._ray.exceptions.RayError:
            pass
        detail = "the run was stopped, and the attempt's Ray node gave no answer"
        await self._close(context, rollout, Ending(failure="interrupted", detail=detail))

    async def _lost(self, context: RunContext, rollout: OpenRollout, why: str) -> Outcome:
        """Close the attempt of a node or worker that is gone, since nobody else does."""
        self._cleaning()  # if only the worker died, its node must remove its sandboxes
        ending = Ending(failure="interrupted", detail=f"its Ray node was lost: {why}")
        lost = await self._close(context, rollout, ending)
        return Outcome(attempt_id=max(lost, default=None), reward=None, failure=ending.failure, detail=ending.detail)

    async def _close(self, context: RunContext, rollout: OpenRollout, ending: Ending) -> list[int]:
        """Close what is open of a rollout's attempts, with what their calls have sampled; return their ids.

        If another harness owns the run by now, they are that one's, and stay open.
        """
        await context.end_calls(await context.pool(still_open, context.owner, rollout_id=rollout.rollout_id))
        return await context.pool(close_lost, rollout.rollout_id, context.owner, ending)

    def _cleaning(self) -> list[Any]:
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        return [
            self._clean_up.options(scheduling_strategy=strategy(node["NodeID"], soft=False)).remote()
            for node in self._nodes()
        ]


class _Stranded(Exception):
    """All nodes that the attempt could run on are gone."""


def _placement(wants: dict[str, float], avoided: set[str]) -> dict[str, Any]:
    """Ray's options for the resources of an attempt and the nodes that it must avoid."""
    selector = {"ray.io/node-id": f"!in({','.join(sorted(avoided))})"} if avoided else {}
    return {"num_cpus": wants["CPU"], "memory": wants["memory"], "label_selector": selector}


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
