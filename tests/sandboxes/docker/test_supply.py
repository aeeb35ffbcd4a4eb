"""The seam to those who bring a container its main process, mounts and environment."""

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from sandboxes.base import Image, SandboxError, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.wiring import Supply
from tests.sandboxes.docker.conftest import SMALL, says

MAIN = ("/bin/sh", "-c", "echo up >/tmp/up; while :; do sleep 300 & wait $!; done")


@dataclass
class Bringer:
    """Brings a directory of this machine, and waits for the main process to have written its file."""

    supply_of: Supply
    asked: list[str] = field(default_factory=list)
    ready: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)

    async def supply(self, sandbox: str, spec: Spec) -> Supply:
        self.asked.append(sandbox)
        return replace(self.supply_of, ready=self._ready)

    async def release(self, sandbox: str) -> None:
        self.released.append(sandbox)

    async def _ready(self, container: str, since: float) -> None:
        self.ready.append(container)
        if not self.supply_of.main:
            raise SandboxError("nothing will ever be ready")


async def test_a_container_has_what_its_suppliers_bring(docker_daemon: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "tool").write_text("a tool\n")
    mount = {"Type": "bind", "Source": str(tmp_path), "Target": "/opt/tools", "ReadOnly": True}
    supply = Supply(main=MAIN, mounts=[mount], env={"TOOLS": "/opt/tools"}, model_url="http://x", bundles="/opt/tools")
    bringer = Bringer(supply)
    sandboxes = await DockerSandboxes.open(Options(address=docker_daemon, suppliers=[bringer]))
    sandbox = await sandboxes.start(replace(SMALL, image=Image(name="bb:1")))
    assert (sandbox.model_url, sandbox.bundles) == ("http://x", "/opt/tools")
    assert await says(sandbox, "cat $TOOLS/tool; (echo x >$TOOLS/x) 2>&1 | grep -c Read-only") == "a tool\n1"
    assert await sandbox.end_processes() == 0
    assert await says(sandbox, "cat /tmp/up") == "up"
    assert bringer.ready == [sandbox.container] and bringer.released == []
    await sandboxes.close()
    assert bringer.released == bringer.asked == [sandbox.id]


async def test_a_sandbox_whose_main_process_never_gets_ready_leaves_nothing(docker_daemon: str) -> None:
    bringer = Bringer(Supply())
    sandboxes = await DockerSandboxes.open(Options(address=docker_daemon, suppliers=[bringer]))
    with pytest.raises(SandboxError, match="nothing will ever be ready"):
        await sandboxes.start(replace(SMALL, image=Image(name="bb:1")))
    assert bringer.released == bringer.asked
    with pytest.raises(SandboxError, match="No such container"), sandboxes.daemon.translating_errors("looking"):
        await sandboxes.daemon.container(bringer.ready[0]).show()
    await sandboxes.close()
