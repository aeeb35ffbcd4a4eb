"""Docker sandboxes for the tests beside this file."""

from collections.abc import AsyncIterator, Callable

import pytest
from aiodocker import DockerError
from aiodocker.containers import DockerContainer

from sandboxes.base import Limits, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.container.sandbox import DockerSandbox

SMALL = Spec(memory_mb=256, disk_mb=64, pids=64, network="none")
HARBOR = Spec(profile="harbor", memory_mb=256, pids=64, network="none")


@pytest.fixture
async def sandboxes(docker_daemon: str) -> AsyncIterator[DockerSandboxes]:
    """The back end on the tests' daemon, with Debian as the default image."""
    opened = await DockerSandboxes.open(Options(address=docker_daemon, image="deb:py", run="test"))
    yield opened
    await opened.close()


@pytest.fixture
async def strict(sandboxes: DockerSandboxes) -> AsyncIterator[DockerSandbox]:
    """A strict sandbox of 256 MB, 64 processes and 64 MB of disk."""
    sandbox = await sandboxes.start(SMALL)
    yield sandbox
    await sandbox.stop()


@pytest.fixture
async def harbor(sandboxes: DockerSandboxes) -> AsyncIterator[DockerSandbox]:
    """A sandbox of profile harbor."""
    sandbox = await sandboxes.start(HARBOR)
    yield sandbox
    await sandbox.stop()


async def says(sandbox: DockerSandbox, command: str, **more: str) -> str:
    """What a command that succeeds writes."""
    result = await sandbox.run(command, Limits(seconds=120), {}, **more)  # type: ignore[arg-type]
    assert (result.ended, result.exit_code) == ("exit", 0), result.output
    return result.output.strip()


def unpausable(container: Callable[[str], DockerContainer]) -> Callable[[str], DockerContainer]:
    """Containers that a daemon fails to pause, as runc does while processes fork."""

    async def refuse() -> None:
        raise DockerError(500, "OCI runtime pause failed: unable to freeze: unknown")

    def of(name: str) -> DockerContainer:
        found = container(name)
        found.pause = refuse  # type: ignore[method-assign]
        return found

    return of
