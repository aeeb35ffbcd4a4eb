"""A killed owner leaves its sandbox; `sandboxes ls` shows it and `sandboxes gc` ends it, and nobody else's."""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from sandboxes.base import SandboxError
from sandboxes.cli import main
from sandboxes.local import bubblewrap, memory_group
from sandboxes.local.leftovers import ListedSandbox, list_sandboxes, remove_orphans
from sandboxes.local.process import ProcessSandboxes, default_root, remove
from sandboxes.local.processes import MARK, processes_of, table
from sandboxes.local.removal import ASIDE
from tests.conftest import need
from tests.sandboxes.test_bubblewrap import ORPHAN, ROOT
from tests.sandboxes.test_process import until

OWNER = """
import asyncio, sys
from pathlib import Path
from sandboxes.base import Limits
from sandboxes.local.process import ProcessSandboxes, default_root
from sandboxes.local.processes import table
from tests.conftest import need
async def own():
    sandbox = await ProcessSandboxes(Path(sys.argv[1])).start()
    await sandbox.run("setsid sleep 600 >/dev/null 2>&1 & sleep 0.2; echo", Limits(), {})
    print("up", flush=True)
    await sandbox.run("sleep 600", Limits(), {})
asyncio.run(own())
"""


@pytest.fixture
def killed_owner(tmp_path: Path) -> int:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None and owner.stdout.readline() == "up\n"
    owner.send_signal(signal.SIGKILL)
    owner.communicate()
    return owner.pid


async def test_gc_ends_what_a_killed_owner_left_and_nothing_else(killed_owner: int, tmp_path: Path) -> None:
    mine = await ProcessSandboxes(tmp_path).start()

    def left() -> ListedSandbox:
        return {sandbox.owner: sandbox for sandbox in list_sandboxes(tmp_path)}[killed_owner]

    await until(lambda: left().processes >= 1)
    assert left().orphaned
    assert killed_owner in {sandbox.owner for sandbox in remove_orphans(tmp_path)}
    assert [sandbox.id for sandbox in list_sandboxes(tmp_path) if sandbox.directory.exists()] == [mine.id]
    await mine.stop()


async def test_gc_removes_a_memory_limit_that_was_made_in_another_control_group(tmp_path: Path) -> None:
    elsewhere = memory_group.make(f"elsewhere-{tmp_path.name}", 1 << 30)
    need("a control group for memory (cgroup version 1 or 2, as root)", elsewhere is not None)
    assert elsewhere is not None
    command = elsewhere.enter([sys.executable, "-c", OWNER, str(tmp_path)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "up\n"
        owner.kill()
    (left,) = [sandbox.id for sandbox in list_sandboxes(tmp_path) if sandbox.owner == owner.pid]
    assert len(memory_group.left_by([left])) == 1
    assert left in {sandbox.id for sandbox in remove_orphans(tmp_path)}
    assert memory_group.left_by([left]) == []
    elsewhere.remove()
    assert not elsewhere.directory.exists()


def test_kill_9_of_the_owner_ends_everything_in_bubblewrap_and_the_directory_is_collected(tmp_path: Path) -> None:
    """Not beside the other tests of bubblewrap: these may run beside tests that leave such things as well."""
    need("bubblewrap (apt-get install bubblewrap)", not bubblewrap.why_not())
    owner = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(tmp_path), "hang"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    sandbox = owner.stdout.readline().split()[0]
    owner.kill()
    owner.communicate()
    assert [removed.id for removed in remove_orphans(tmp_path)] == [sandbox]
    assert processes_of(table(), sandbox) == [] and list(tmp_path.iterdir()) == []


def test_the_command_lists_and_collects(killed_owner: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--root", str(tmp_path)]) == 0
    assert f"orphaned, its owner {killed_owner} is dead" in capsys.readouterr().out
    assert main(["gc", "--root", str(tmp_path)]) == 0
    assert "sandboxes of dead owners" in capsys.readouterr().out
    assert killed_owner not in {sandbox.owner for sandbox in list_sandboxes(tmp_path)}


def wait_for_mark(mark: str) -> None:
    """Wait until a process shows this mark, as it shows none within its execve."""
    while mark not in {process.sandbox for process in table()}:
        time.sleep(0.01)


INSIDE = """
import os, subprocess, sys
from sandboxes.local.process import default_root
from sandboxes.local.processes import MARK
child = subprocess.Popen(["sleep", "600"], env={MARK: sys.argv[1]})
print(default_root(), flush=True)
child.wait()
"""


def test_what_another_process_namespace_owns_is_left_alone(tmp_path: Path) -> None:
    need("unshare, as root (util-linux)", shutil.which("unshare") is not None and os.geteuid() == 0)
    name = f"999999-1-{secrets.token_hex(4)}"  # its owner lives there, and there is no such process here
    apart = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with subprocess.Popen([*apart, sys.executable, "-c", INSIDE, name], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        root = other.stdout.readline().strip()
        wait_for_mark(name)
        assert root != str(default_root()) and root.startswith(str(default_root()))
        remove_orphans(tmp_path)
        assert name in {process.sandbox for process in table()} and name not in {
            one.id for one in list_sandboxes(tmp_path)
        }
        other.kill()


async def test_a_root_that_is_somebody_elses_is_neither_used_nor_emptied(tmp_path: Path) -> None:
    need("root, to give a directory away", os.geteuid() == 0)
    (tmp_path / "theirs" / "999999-1-0000000a").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path)
    os.chown(tmp_path / "theirs", 65534, 65534)
    for root in (tmp_path / "theirs", tmp_path / "link"):
        with pytest.raises(SandboxError, match="not a directory of this user; remove it, or set TMPDIR"):
            await ProcessSandboxes(root).start()
        assert remove_orphans(root) == []
    assert (tmp_path / "theirs" / "999999-1-0000000a").exists()


@pytest.mark.parametrize(
    "name", ["²-1-0000000a", "999999-1-x", "999999-1-0000000a-1", "999999-1-0000000g", "999999-1-0000000a\n", "9" * 200]
)
def test_a_name_that_only_looks_like_a_sandboxs_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert name not in {one.id for one in (*list_sandboxes(tmp_path), *remove_orphans(tmp_path))}
    assert (tmp_path / name).exists()


@pytest.mark.parametrize("mark", ["999999-1-0000000a/../../victim", f"{'9' * 5000}-1-0000000a"])
def test_a_process_that_names_another_place_as_its_sandbox_leads_nobody_there(tmp_path: Path, mark: str) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "root" / "999999-1-0000000a").mkdir(parents=True)
    with subprocess.Popen(["sleep", "600"], env={MARK: mark}) as process:
        try:
            wait_for_mark(mark)
            assert mark not in {one.id for one in list_sandboxes(tmp_path / "root")}
            remove_orphans(tmp_path / "root")
            assert (tmp_path / "victim").exists() and process.poll() is None
        finally:
            process.kill()


def deep(directory: Path, levels: int) -> None:
    """Make directories inside one another, each with a file and closed to everybody, by a process like an agent's."""
    make = "import os\nfor i in range({}):\n open('f', 'w').close(); os.mkdir('deep'); os.chdir('deep')\n"
    make += " os.chmod('..', 0o100)"
    directory.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", make.format(levels)], cwd=directory, check=True)


def test_a_tree_deeper_than_python_recurses_and_than_a_path_may_be_long_is_removed(tmp_path: Path) -> None:
    deep(tmp_path / "sandbox", 1500)
    assert remove(tmp_path / "sandbox") == "" and list(tmp_path.iterdir()) == []


def test_what_cannot_be_removed_is_moved_aside_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    need("root, to mount", os.geteuid() == 0)
    for name in ("999999-1-0000000a", "999999-1-0000000b"):
        (tmp_path / name / "work" / "place").mkdir(parents=True)
    stuck = tmp_path / "999999-1-0000000a" / "work" / "place"
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", stuck], check=True)
    try:
        assert main(["gc", "--root", str(tmp_path), "--docker", "unix:///nowhere.sock"]) == 1
        assert [path.name for path in tmp_path.iterdir()] == [ASIDE]  # in nobody's way, and the others are gone
        (moved,) = (tmp_path / ASIDE).iterdir()
        assert f"error: {moved} cannot be removed (" in capsys.readouterr().err
    finally:
        subprocess.run(["umount", "-l", *(str(path) for path in tmp_path.glob("**/place"))], check=True)
    assert remove_orphans(tmp_path) == [] and list((tmp_path / ASIDE).iterdir()) == []


def test_what_a_sandbox_links_to_stays_as_it_is_when_the_sandbox_is_removed() -> None:
    place = Path(tempfile.mkdtemp())
    (place / "outside").touch(mode=0o644)
    shut = place / "sandbox" / "shut"
    shut.mkdir(parents=True)
    (shut / "link").symlink_to(place / "outside")
    shut.chmod(0o555)
    nobody = 65534 if os.geteuid() == 0 else os.geteuid()
    for path in (place, place / "outside", shut.parent, shut):
        os.chown(path, nobody, -1)
    os.seteuid(nobody)  # root may remove from whatever is shut
    try:
        remove(place / "sandbox")
        assert [path.name for path in place.iterdir()] == ["outside"]
        assert (place / "outside").stat().st_mode & 0o777 == 0o644
    finally:
        os.seteuid(os.getuid())
        shutil.rmtree(place)
