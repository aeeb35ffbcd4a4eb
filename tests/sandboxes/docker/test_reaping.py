"""What dead owners left on a daemon is removed, after kill -9 of the owner and of the daemon, and nothing else is."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
from aiodocker import DockerError
from aiodocker.containers import DockerContainer

from harness.cli import main as harness
from sandboxes.cli import main
from sandboxes.docker.labels import KIND, ResourceOwner, labels_of, this_process
from sandboxes.gc import SearchScope, remove_leftovers
from sandboxes.local.processes import start_of
from tests.daemons import OwnDaemon, own_daemon
from tests.harness.conftest import HELLO, write_tasks

There = Callable[..., list[str]]


class Make(Protocol):
    def __call__(self, kind: str, owner: ResourceOwner, purpose: str = "sandbox") -> str: ...


@pytest.fixture
def dead() -> ResourceOwner:
    """The owner that a process was that was killed."""
    with subprocess.Popen(["sleep", "600"]) as process:
        owner = replace(this_process(), pid=process.pid, started=start_of(process.pid) or 0)
        process.kill()
    return owner


@pytest.fixture(scope="module")
def daemon(docker_daemon: str) -> Iterator[OwnDaemon]:
    """Where nobody else removes what looks dead."""
    with own_daemon() as started:
        yield started


@pytest.fixture
def make(daemon: OwnDaemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Make a labelled container, network or volume on the daemon, which is the usual one, and say its name."""
    monkeypatch.setenv("DOCKER_HOST", daemon.address)
    resources: list[tuple[str, str]] = []

    def one(kind: str, owner: ResourceOwner, purpose: str = "sandbox") -> str:
        name = f"test-{len(resources)}"
        resources.append((kind, name))
        labelled(daemon.say, kind, name, owner, purpose)
        return name

    yield one
    for kind, name in resources:
        force = ["--force"] if kind == "container" else []
        subprocess.run([*daemon.docker, kind, "rm", *force, name], capture_output=True)


def labelled(docker: Callable[..., str], kind: str, name: str, owner: ResourceOwner, purpose: str = "sandbox") -> None:
    labels = [f"--label={label}={value}" for label, value in labels_of(purpose, owner, "a-run").items()]
    if kind == "container":
        docker("run", "--detach", "--network", "none", "--name", name, *labels, "bb:1", "sleep", "600")
    elif kind == "network":
        docker("network", "create", "--internal", *labels, name)
    else:
        docker("volume", "create", "--name", name, *labels)


@pytest.fixture
def there(daemon: OwnDaemon) -> Callable[..., list[str]]:
    """Which of these names there still are."""

    def left(kind: str, *names: str) -> list[str]:
        every, column = (["--all"], "{{.Names}}") if kind == "container" else ([], "{{.Name}}")
        listed = daemon.say(kind, "ls", *every, "--format", column)
        return [name for name in names if name in listed.split()]

    return left


@pytest.mark.parametrize("kind", ["container", "network", "volume"])
def test_gc_removes_what_a_dead_owner_left_and_nothing_else(
    make: Make, there: There, dead: ResourceOwner, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, orphan = make(kind, this_process()), make(kind, dead)
    reused = make(kind, replace(this_process(), started=1))
    far = make(kind, replace(dead, host="elsewhere", boot="another pid:[1]"))
    assert main(["ls", "--root", str(tmp_path)]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert f"in use by process {os.getpid()}" in lines[mine] and "run a-run" in lines[mine]
    assert f"orphaned, its owner {dead.pid} is dead" in lines[orphan] and f" {kind}, sandbox " in lines[orphan]
    assert f"of process {dead.pid} on elsewhere, which cannot be checked from here" in lines[far]
    assert main(["gc", "--root", str(tmp_path)]) == 0
    assert there(kind, mine, orphan, reused, far) == [mine, far]
    assert main(["gc", "--root", str(tmp_path), "--host", "elsewhere"]) == 0
    assert there(kind, mine, far) == [mine]


def test_what_cannot_be_removed_is_told_and_keeps_nothing_else_from_being_removed(
    make: Make,
    there: There,
    dead: ResourceOwner,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a daemon that finds a container's disk busy."""
    orphans = [make("container", dead), make("container", dead), make("container", dead)]
    network = make("network", dead)
    delete = DockerContainer.delete

    async def busy(self: DockerContainer, **options: Any) -> None:
        if self._id == orphans[1]:
            raise DockerError(500, "device or resource busy")
        await delete(self, **options)

    monkeypatch.setattr(DockerContainer, "delete", busy)
    assert main(["gc", "--root", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert f"error: removing the container {orphans[1]}: device or resource busy; remove it by hand" in said.err
    assert "2 containers on" in said.out and "1 networks on" in said.out
    assert there("container", *orphans) == [orphans[1]] and there("network", network) == []


def test_bundles_stay_until_they_are_asked_for(
    make: Make, there: There, daemon: OwnDaemon, dead: ResourceOwner, tmp_path: Path
) -> None:
    shared = make("volume", dead, "bundle")
    daemon.say("volume", "create", "--name", "of-nobody", f"--label={KIND}=bundle")
    remove_leftovers(SearchScope(root=tmp_path))
    assert there("volume", shared, "of-nobody") == [shared, "of-nobody"]
    assert sorted(thing.name for thing in remove_leftovers(SearchScope(root=tmp_path), bundles=True).resources) == [
        "of-nobody",
        shared,
    ]


@pytest.mark.timeout(600)
def test_after_kill_9_of_the_engine_the_next_start_reaps(
    make: Make, there: There, daemon: OwnDaemon, dead: ResourceOwner, tmp_path: Path
) -> None:
    orphan, volume, living = make("container", dead), make("volume", dead), make("container", this_process())
    where = SearchScope(root=tmp_path)
    daemon.kill()
    try:
        assert "does not answer" in remove_leftovers(where).troubles[0]
    finally:
        daemon.start()
    assert [thing.name for thing in remove_leftovers(where).resources] == [orphan, volume]
    assert there("container", orphan, living) == [living]


def test_an_engine_that_is_not_there_is_told_and_the_others_are_asked(
    make: Make, there: There, daemon: OwnDaemon, dead: ResourceOwner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    orphan = make("container", dead)
    nobody = f"unix://{tmp_path}/no.sock"
    assert main(["gc", "--root", str(tmp_path), "--docker", nobody, "--docker", daemon.address]) == 1
    assert f"the Docker daemon at {nobody} does not answer" in capsys.readouterr().err
    assert there("container", orphan) == []


OWNER = """
import asyncio, sys
from sandboxes.base import Image, Limits, Spec
from sandboxes.docker.backend import DockerSandboxes
async def own():
    sandbox = await (await DockerSandboxes.open()).start(Spec(image=Image(name="bb:1"), network="none"))
    await sandbox.run("setsid sleep 600 >/dev/null 2>&1 &", Limits(), {})
    print(sandbox.container, flush=True)
    await sandbox.run("sleep 600", Limits(), {})
asyncio.run(own())
"""


def test_kill_9_of_an_owner_leaves_a_living_sandbox_that_the_next_start_removes(
    make: Make, there: There, daemon: OwnDaemon, tmp_path: Path
) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    name = owner.stdout.readline().strip()
    owner.kill()
    owner.communicate()
    mine = make("container", this_process())
    assert daemon.say("inspect", "--format", "{{.State.Running}}", name) == "true"
    assert name in [thing.name for thing in remove_leftovers(SearchScope(root=tmp_path)).resources]
    assert there("container", name, mine) == [mine]


def test_the_start_of_a_run_reaps(make: Make, there: There, dead: ResourceOwner, tmp_path: Path) -> None:
    orphan, mine = make("container", dead), make("container", this_process())
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO)
    nowhere = ["--proxy", "http://127.0.0.1:9", "--run-dir", str(tmp_path / "run")]
    assert harness(["run", str(tasks), "--agent", "command", "--command", "true", *nowhere]) == 2
    assert there("container", orphan, mine) == [mine]
