"""Services beside a sandbox: further containers that share its network, as the containers of a Kubernetes pod do.

A service is reached at its name, which resolves to the loopback. It has the sandbox's network and no other, and two
services cannot listen on the same port. They start in order, each when the one before is ready, and end with the
sandbox. Left out: protection from what a service lets its clients do; that is up to the task.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from sandboxes.base import SandboxError, Service, Spec
from sandboxes.docker.daemon import ContainerCommand, DockerDaemon, start_container
from sandboxes.docker.image.images import Images
from sandboxes.docker.isolation.walls import with_walls
from sandboxes.docker.labels import IMAGE, KIND
from sandboxes.docker.profiles import HARBOR_ROOT, limits_of
from sandboxes.output import BoundedOutput

PAUSE_SECONDS = 0.2
TRY_SECONDS = 30.0


def service_container(main: str, name: str) -> str:
    """Return the name of a service's container beside the container `main`."""
    return f"{main}-{name}"


def names_of(main: str, spec: Spec) -> list[str]:
    """Return the names of all service containers beside the container `main`."""
    return [service_container(main, service.name) for service in spec.services]


async def start_services(
    daemon: DockerDaemon, images: Images, main: str, spec: Spec, labels: Mapping[str, str]
) -> None:
    """Start all services. SandboxError, with the end of its log, for one that does not get ready."""
    for service, name in zip(spec.services, names_of(main, spec), strict=True):
        base = await images.base(Spec(image=service.image, profile="harbor"))
        config = _config(service, base.id, main, spec) | {"Labels": {**labels, KIND: "service", IMAGE: base.name}}
        config = with_walls(config, daemon.seccomp, "strict", spec.system_calls)
        with daemon.translating_errors(f"starting the service {service.name} of image {base.name}"):
            container = await daemon.docker.containers.create(config, name=name)
            await start_container(container)
        await _until_ready(daemon, name, service)


def _config(service: Service, image: str, main: str, spec: Spec) -> dict[str, Any]:
    config: dict[str, Any] = {
        "Image": image,
        "Env": [f"{name}={value}" for name, value in service.env.items()],
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": limits_of(spec)
        | {
            "NetworkMode": f"container:{main}",
            "CapDrop": ["ALL"],
            "CapAdd": list(HARBOR_ROOT),
            "SecurityOpt": ["no-new-privileges"],
            "Init": True,
            "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m"}},
        },
    }
    return config | ({"Cmd": list(service.command)} if service.command else {})


async def _until_ready(daemon: DockerDaemon, name: str, service: Service) -> None:
    deadline = time.monotonic() + service.ready_seconds
    check = ContainerCommand(argv=("/bin/sh", "-c", service.ready or "true"), user="", work="")
    while True:
        output = BoundedOutput(2000)
        if not await _runs(daemon, name):
            raise SandboxError(f"the service {service.name} has ended: {await _log(daemon, name)}")
        if not service.ready:
            return
        try:
            async with asyncio.timeout(TRY_SECONDS):
                if await daemon.execute(name, check, output.add) == 0:
                    return
        except (SandboxError, TimeoutError):  # it may be ending, or not have started fully yet
            pass
        if time.monotonic() > deadline:
            raise SandboxError(
                f"the service {service.name} was not ready after {service.ready_seconds:g} s "
                f"({service.ready!r} says: {output.text()[-200:].strip()}): {await _log(daemon, name)}"
            )
        await asyncio.sleep(PAUSE_SECONDS)


async def _runs(daemon: DockerDaemon, name: str) -> bool:
    with daemon.translating_errors(f"the service {name}"):
        return bool((await daemon.container(name).show())["State"]["Running"])


async def _log(daemon: DockerDaemon, name: str) -> str:
    with daemon.translating_errors(f"the log of {name}"):
        return "".join(await daemon.container(name).log(stdout=True, stderr=True, tail=20))[-500:].strip()
