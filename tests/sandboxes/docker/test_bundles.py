"""Bundles reach every sandbox as volumes: uploaded once per content, complete or not at all, for reading only."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from sandboxes.base import Image, SandboxError, Spec
from sandboxes.bundles import AGENTS, MANIFEST, RUNTIME, read_manifest, seal_bundle
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.bundles import Bundles, volume_of
from sandboxes.docker.daemon import DockerDaemon
from sandboxes.docker.labels import KIND
from tests.sandboxes.docker.conftest import says

ASKED = Spec(image=Image(name="deb:py"), memory_mb=256, disk_mb=64, pids=64, network="none", agent="toy")
PROGRAM = "#!/bin/sh\necho toy\n"
ROOT = Path(__file__).parents[3]
UPLOAD = """
import asyncio, sys
from pathlib import Path
from sandboxes.base import Spec
from sandboxes.docker.bundles import Bundles
from sandboxes.docker.daemon import DockerDaemon

async def main(address, directory):
    await Bundles(await DockerDaemon.open(address), Path(directory)).supply("x", Spec(agent="toy"))

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A runtime and the agent `toy`: nobody else has bundles of this content."""
    (tmp_path / "bundles/runtime").mkdir(parents=True)
    (tmp_path / "bundles/runtime/empty").write_text(str(tmp_path))
    toy = tmp_path / "bundles/toy"
    (toy / "bin").mkdir(parents=True)
    (toy / "bin/toy").write_text(PROGRAM)
    (toy / "bin/toy").chmod(0o700)
    (toy / "start").symlink_to("bin/toy")
    (toy / "data").write_bytes(os.urandom(3 << 20))
    seal_bundle(toy, "toy", "1.0")
    seal_bundle(tmp_path / "bundles/runtime", "runtime", "0")
    return tmp_path / "bundles"


@pytest.fixture
async def daemon(docker_daemon: str, directory: Path) -> AsyncIterator[DockerDaemon]:
    opened = await DockerDaemon.open(docker_daemon)
    yield opened
    for volume in volumes(directory):
        subprocess.run(["docker", "volume", "rm", volume], capture_output=True)
    await opened.close()


def volumes(directory: Path) -> list[str]:
    manifests = [read_manifest(path) for path in sorted(directory.iterdir())]
    return [volume_of(manifest) for manifest in manifests if manifest]


def there(directory: Path) -> list[str]:
    return sorted(set(listed("volume", "ls")) & set(volumes(directory)))


def listed(*what: str) -> list[str]:
    return subprocess.run(["docker", *what, "--quiet"], capture_output=True, text=True, check=True).stdout.split()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(holds):
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("way", ["volume", "bind"])
async def test_a_sandbox_runs_what_is_in_a_bundle_and_cannot_change_it(
    way: str, daemon: DockerDaemon, directory: Path
) -> None:
    bundles = Bundles(daemon, directory, way)  # type: ignore[arg-type]
    sandboxes = DockerSandboxes(daemon, Options(suppliers=(bundles,)))
    sandbox = await sandboxes.start(ASKED)
    try:
        assert sandbox.bundles == AGENTS and await says(sandbox, f"{AGENTS}/toy/start") == "toy"
        output = await says(sandbox, f"sha256sum {AGENTS}/toy/data; cat {RUNTIME}/empty; stat -c %u {AGENTS}/toy/data")
        here = subprocess.run(["sha256sum", directory / "toy/data"], capture_output=True, text=True, check=True).stdout
        assert output.split() == [here.split()[0], f"{AGENTS}/toy/data", str(directory.parent) + "0"]
        for user in ("agent", "root"):
            refused = f"! touch {AGENTS}/toy/x && ! rm -f {AGENTS}/toy/data && ! mkdir {RUNTIME}/x"
            assert await says(sandbox, f"({refused}) 2>/dev/null; echo $?", user=user) == "0"
    finally:
        await sandbox.stop()
    assert there(directory) == (sorted(volumes(directory)) if way == "volume" else [])


async def test_many_who_want_a_bundle_at_once_upload_it_once(daemon: DockerDaemon, directory: Path) -> None:
    several = [Bundles(daemon, directory) for _ in range(3)]  # as of three processes
    supplies = await asyncio.gather(*(bundles.supply("x", ASKED) for bundles in several * 4))
    assert len({str(supply) for supply in supplies}) == 1 and there(directory) == sorted(volumes(directory))
    os.truncate(directory / "toy/data", 1)  # so that one more upload would show
    sandbox = await DockerSandboxes(daemon, Options(suppliers=(Bundles(daemon, directory),))).start(ASKED)
    try:
        assert await says(sandbox, f"stat -c %s {AGENTS}/toy/data") == str(3 << 20)
    finally:
        await sandbox.stop()


async def test_a_volume_that_is_removed_while_a_run_goes_on_is_filled_again(
    daemon: DockerDaemon, directory: Path
) -> None:
    sandboxes = DockerSandboxes(daemon, Options(suppliers=(Bundles(daemon, directory),)))
    await (await sandboxes.start(ASKED)).stop()
    for make_again in (False, True):
        for volume in volumes(directory):
            subprocess.run(["docker", "volume", "rm", volume], check=True, capture_output=True)
            if make_again:  # empty and without labels, as a daemon makes one for a container that names it
                subprocess.run(["docker", "volume", "create", "--name", volume], check=True, capture_output=True)
        started = await asyncio.gather(*(sandboxes.start(ASKED) for _ in range(3)))
        try:
            assert [await says(sandbox, f"{AGENTS}/toy/start") for sandbox in started] == ["toy"] * 3
        finally:
            await asyncio.gather(*(sandbox.stop() for sandbox in started))
        assert set(volumes(directory)) <= set(listed("volume", "ls", "--filter", f"label={KIND}=bundle"))


async def test_a_volume_without_our_label_that_is_in_use_is_filled_as_it_is(
    daemon: DockerDaemon, directory: Path
) -> None:
    mount = f"--mount=type=volume,source={volumes(directory)[1]},target=/x"
    user = subprocess.run(["docker", "create", mount, "bb:1"], check=True, capture_output=True, text=True).stdout
    try:
        sandboxes = DockerSandboxes(daemon, Options(suppliers=(Bundles(daemon, directory),)))
        for _ in range(2):
            sandbox = await sandboxes.start(ASKED)
            assert await says(sandbox, f"{AGENTS}/toy/start") == "toy"
            await sandbox.stop()
    finally:
        subprocess.run(["docker", "rm", user.strip()], check=True, capture_output=True)


async def test_an_upload_that_was_broken_off_does_not_count_and_its_holder_is_removed(
    daemon: DockerDaemon, docker_daemon: str, directory: Path
) -> None:
    os.truncate(directory / "toy/data", 4 << 30)  # seconds of work
    with subprocess.Popen([sys.executable, "-c", UPLOAD, docker_daemon, directory], cwd=ROOT) as uploading:
        holder = f"{volumes(directory)[1]}-filling"
        await until(lambda: bool(listed("container", "ls", "--all", "--filter", f"name={holder}")))
        uploading.kill()
    os.truncate(directory / "toy/data", 1000)
    sandboxes = DockerSandboxes(daemon, Options(suppliers=(Bundles(daemon, directory),)))
    sandbox = await sandboxes.start(ASKED)
    try:
        assert await says(sandbox, f"{AGENTS}/toy/start && cat {RUNTIME}/{MANIFEST} | head -c 1") == "toy\n{"
    finally:
        await sandbox.stop()


@pytest.mark.parametrize("steps", range(1, 30, 4))
async def test_a_holder_that_is_being_made_when_it_is_given_up_does_not_stay(
    steps: int, daemon: DockerDaemon, directory: Path
) -> None:
    """Given up after some turns of the event loop: before the request, while the daemon works at it, after it."""
    bundles = Bundles(daemon, directory)
    supplying = asyncio.create_task(bundles.supply("x", Spec()))
    while not there(directory):
        await asyncio.sleep(0)
    for _ in range(steps):
        await asyncio.sleep(0.001)
    supplying.cancel()
    await asyncio.wait({supplying})
    await bundles.close()
    assert listed("container", "ls", "--all", "--filter", f"name={volumes(directory)[0]}-filling") == []


async def test_an_upload_that_is_given_up_leaves_no_holder(daemon: DockerDaemon, directory: Path) -> None:
    os.truncate(directory / "toy/data", 4 << 30)  # seconds of work
    bundles = Bundles(daemon, directory)
    holders = ("container", "ls", "--all", "--filter", f"name={volumes(directory)[1]}-filling")
    supplying = asyncio.create_task(bundles.supply("x", ASKED))
    await until(lambda: bool(listed(*holders)))
    supplying.cancel()
    await asyncio.wait({supplying})
    await bundles.close()
    assert listed(*holders) == []


async def test_a_bundle_that_is_not_installed_is_named_with_the_way_to_get_it(
    daemon: DockerDaemon, directory: Path
) -> None:
    (directory / "toy" / MANIFEST).unlink()
    for way in ("volume", "bind"):
        with pytest.raises(SandboxError, match=r"no bundle .*/toy; run: harness agents install toy$"):
            await Bundles(daemon, directory, way).supply("x", ASKED)  # type: ignore[arg-type]
