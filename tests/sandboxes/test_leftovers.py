"""A killed owner leaves its sandbox; `sandboxes ls` shows it and `sandboxes gc` ends it, and nobody else's."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes.cli import main
from sandboxes.leftovers import collect, found
from sandboxes.process import ProcessSandboxes

OWNER = """
import asyncio, sys
from pathlib import Path
from sandboxes.base import Limits
from sandboxes.process import ProcessSandboxes
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
    left = {sandbox.owner: sandbox for sandbox in found(tmp_path)}[killed_owner]
    assert left.orphaned and left.processes >= 1
    assert killed_owner in {sandbox.owner for sandbox in collect(tmp_path)}
    assert [sandbox.id for sandbox in found(tmp_path) if sandbox.directory.exists()] == [mine.id]
    await mine.stop()


def test_the_command_lists_and_collects(killed_owner: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls", "--root", str(tmp_path)]) == 0
    assert f"orphaned, its owner {killed_owner} is dead" in capsys.readouterr().out
    assert main(["gc", "--root", str(tmp_path)]) == 0
    assert "sandboxes of dead owners" in capsys.readouterr().out
    assert killed_owner not in {sandbox.owner for sandbox in found(tmp_path)}
