"""Services beside a sandbox, in real containers: reached by name, ready before the sandbox is, and gone with it."""

import subprocess
from dataclasses import replace

import pytest

from sandboxes.base import Image, SandboxError, Service
from sandboxes.docker.backend import DockerSandboxes
from tests.sandboxes.docker.conftest import HARBOR, SMALL, says

BUSYBOX = Image(name="bb:1")
SERVE = "mkdir /www; echo $WORDS > /www/x; sleep 1; exec httpd -f -p {port} -h /www"


def serving(name: str, port: int) -> Service:
    command = ("/bin/sh", "-c", SERVE.format(port=port))
    ready = f"wget -q -O /dev/null http://127.0.0.1:{port}/x"
    return Service(name=name, image=BUSYBOX, command=command, env={"WORDS": f"I am {name}"}, ready=ready)


def beside(sandbox: str) -> str:
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"label=blackforge.sandbox={sandbox}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("spec", [SMALL, HARBOR], ids=["strict", "harbor"])
async def test_services_are_reached_by_name_and_nothing_else_is(sandboxes: DockerSandboxes, spec: object) -> None:
    base = SMALL if spec is SMALL else HARBOR
    two = (serving("one", 8001), serving("two", 8002))
    sandbox = await sandboxes.start(replace(base, image=Image(name="deb:py"), services=two))
    fetch = "from urllib.request import urlopen as o; print([o(u).read() for u in {urls}])"
    urls = ["http://one:8001/x", "http://two:8002/x"]
    assert await says(sandbox, f'python3 -c "{fetch.format(urls=urls)}"') == "[b'I am one\\n', b'I am two\\n']"
    assert await says(sandbox, "ls /sys/class/net") == "lo"
    assert await sandbox.end_processes() == 0 and len(beside(sandbox.id).split()) == 3
    assert "I am" in await says(sandbox, f'python3 -c "{fetch.format(urls=urls)}"')
    await sandbox.stop()
    assert beside(sandbox.id) == ""


@pytest.mark.parametrize(
    "command, ready, sentence",
    [
        ("echo no luck >&2; exit 3", "true", "the service db has ended: no luck"),
        ("echo slow; exec sleep 600", "echo not yet; false", "'echo not yet; false' says: not yet): slow"),
    ],
)
async def test_a_service_that_does_not_get_ready_is_told_and_nothing_stays(
    sandboxes: DockerSandboxes, command: str, ready: str, sentence: str
) -> None:
    broken = Service(name="db", image=BUSYBOX, command=("/bin/sh", "-c", command), ready=ready, ready_seconds=2)
    with pytest.raises(SandboxError) as raised:
        await sandboxes.start(replace(SMALL, services=(broken,)))
    assert sentence in str(raised.value)
