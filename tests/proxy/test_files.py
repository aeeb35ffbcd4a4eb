"""Files that are replaced in one step, and directories that one process uses at a time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proxy.pool.files import InUse, lock_directory, replacing, write_whole

HOLD = "import sys; from pathlib import Path; from proxy.pool.files import lock_directory as lock\n"
HOLD += "lock(Path(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_whole(file, b"old")
    with pytest.raises(RuntimeError), replacing(file) as partial:
        partial.write_bytes(b"ne")
        assert file.read_bytes() == b"old"
        raise RuntimeError
    assert file.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]
    write_whole(file, b"new", private=True)
    assert file.read_bytes() == b"new" and file.stat().st_mode & 0o777 == 0o600 and os.listdir(tmp_path) == ["file"]


def test_a_file_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "below", tmp_path / "no" / "directory"):
        with pytest.raises(OSError):
            write_whole(place, b"")


def test_a_directory_is_locked_until_its_holder_dies(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path / "new")]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
    with pytest.raises(InUse) as refused:
        lock_directory(tmp_path / "new")
    assert refused.value.holder == str(holder.pid)
    holder.kill()
    os.close(lock_directory(tmp_path / "new", patience_seconds=30))
    holder.communicate()
    assert (tmp_path / "new" / "lock").read_text() == f"{os.getpid()}\n"


CHILD = HOLD.partition("lock(Path")[0] + "import os, time; lock(Path(sys.argv[1]))\n"
CHILD += "os.write(1, b'locked\\n' if os.fork() else b'child\\n'); time.sleep(1.5)"
"""A holder with a child that has the lock too for a second and a half."""


def test_a_child_that_a_killed_holder_was_starting_is_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CHILD, str(tmp_path / "new")]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2])
    assert holder.stdout is not None
    lines = {holder.stdout.readline(), holder.stdout.readline()}
    assert lines == {b"locked\n", b"child\n"}
    holder.kill()
    holder.wait()
    os.close(lock_directory(tmp_path / "new"))
    holder.stdout.close()
