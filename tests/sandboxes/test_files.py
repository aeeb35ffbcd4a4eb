"""Files that go into and out of a sandbox's directory never pass a link that an agent has put in the way."""

import io
import os
import resource
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest

from sandboxes.local import files
from sandboxes.local.files import SandboxPath


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """A sandbox's directory with a link to a file and to a directory outside of it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    base = tmp_path / "inside"
    (base / "real").mkdir(parents=True)
    (base / "away").symlink_to(tmp_path / "outside")
    (base / "real" / "file").symlink_to(tmp_path / "outside" / "secret")
    return base


def test_nothing_is_read_through_a_link(inside: Path, tmp_path: Path) -> None:
    assert files.read(SandboxPath(inside, ("away", "secret")), 99) is None
    assert files.read(SandboxPath(inside, ("real", "file")), 99) is None
    with pytest.raises(OSError):
        files.get(SandboxPath(inside, ("away",)), tmp_path / "copy", 1 << 20)


def test_nothing_is_written_through_a_link(inside: Path, tmp_path: Path) -> None:
    files.write(SandboxPath(inside, ("away", "secret")), b"ours")
    files.write(SandboxPath(inside, ("real", "file")), b"ours")
    assert (inside / "away" / "secret").read_text() == (inside / "real" / "file").read_text() == "ours"
    assert (tmp_path / "outside" / "secret").read_text() == "secret"


def test_a_tree_is_copied_as_it_is(inside: Path, tmp_path: Path) -> None:
    (inside / "real" / "sub" / "empty").mkdir(parents=True)
    (inside / "real" / "sub" / "tool").write_text("#!")
    (inside / "real" / "sub" / "tool").chmod(0o755)
    files.get(SandboxPath(inside, ("real",)), tmp_path / "copy", 1 << 20)
    (inside / "back").symlink_to(tmp_path / "outside")  # in the way of the copy that goes back
    files.put(tmp_path / "copy", SandboxPath(inside, ("back",)))
    back = inside / "back"
    assert not back.is_symlink() and (back / "sub" / "empty").is_dir() and (back / "file").is_symlink()
    assert (back / "sub" / "tool").read_text() == "#!" and (back / "sub" / "tool").stat().st_mode & 0o777 == 0o755
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["secret"]


def test_a_large_file_is_copied_in_pieces(inside: Path, tmp_path: Path) -> None:
    (tmp_path / "large").mkdir()
    with (tmp_path / "large/holes").open("wb") as file:
        file.truncate(400 << 20)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), before[1]))
    try:
        files.put(tmp_path / "large", SandboxPath(inside, ("copy",)))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert (inside / "copy/holes").stat().st_size == 400 << 20


def test_a_tree_that_has_gone_is_not_an_empty_one(inside: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        files.put(tmp_path / "gone", SandboxPath(inside, ("tests",)))


def test_no_more_is_copied_out_than_was_allowed(inside: Path, tmp_path: Path) -> None:
    (inside / "d").mkdir()
    (inside / "d" / "small").write_bytes(b"x" * 1000)
    os.truncate(os.open(inside / "d" / "holes", os.O_CREAT | os.O_WRONLY), 1 << 40)
    with pytest.raises(OSError, match="more than may be copied out"):
        files.get(SandboxPath(inside, ("d",)), tmp_path / "copy", 5 << 20)
    (inside / "d" / "holes").unlink()
    with pytest.raises(OSError, match="more than may be copied out"):
        files.get(SandboxPath(inside, ("d",)), tmp_path / "copy", 999)
    files.get(SandboxPath(inside, ("d",)), tmp_path / "copy", 1000)


def test_a_link_that_turns_into_a_directory_while_it_is_copied_leads_nowhere(inside: Path, tmp_path: Path) -> None:
    outside, copy = tmp_path / "outside", tmp_path / "copy"
    os.truncate(os.open(inside / "big", os.O_CREAT | os.O_WRONLY), 64 << 20)  # to be copied after the link was seen

    def swap() -> None:
        while not (copy / "big").exists():
            time.sleep(0.001)
        (inside / "away").unlink()
        (inside / "away").mkdir()
        (inside / "away" / "secret").write_text("ours")

    swapping = threading.Thread(target=swap, daemon=True)
    swapping.start()
    files.get(SandboxPath(inside, ()), copy, 1 << 30)
    swapping.join()
    assert (outside / "secret").read_text() == "secret"


def test_what_lies_too_deep_to_be_packed_is_in_the_archive_as_left_out(inside: Path) -> None:
    deep = "import os\nfor _ in range(300): os.mkdir('d'); os.chdir('d')\nopen('file', 'w').close()"
    subprocess.run([sys.executable, "-c", deep], cwd=inside / "real", check=True)
    archive = io.BytesIO()
    assert files.pack(SandboxPath(inside, ("real",)), archive, 1 << 20)
    archive.seek(0)
    with tarfile.open(fileobj=archive) as tar:
        kinds = {member.name: member.type for member in tar}
    last = "/".join(["data", *["d"] * (files.MAX_DEPTH + 1)])
    assert kinds[last] == tarfile.FIFOTYPE and max(map(len, kinds)) == len(last)
    assert kinds[last.removesuffix("/d")] == tarfile.DIRTYPE


def test_what_is_packed_is_counted_although_it_is_empty(inside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(30):
        (inside / "real" / str(number)).symlink_to("x" * 1000)
        (inside / "real" / f"{number}.d" / "d").mkdir(parents=True)
    place = SandboxPath(inside, ("real",))
    files.pack(place, io.BytesIO(), 100 << 10)
    with pytest.raises(OSError, match="it holds more than may be copied out"):
        files.pack(place, io.BytesIO(), 50 << 10)
    monkeypatch.setattr(files, "MAX_ENTRIES", 92)  # with "real" itself and what the fixture puts there
    files.pack(place, io.BytesIO(), 100 << 10)
    for path in (inside / "real" / "one more", inside / "real" / "29.d" / "d" / "one more"):
        path.touch()
        with pytest.raises(OSError, match="it holds more than 92 files"):
            files.pack(place, io.BytesIO(), 100 << 10)
        path.unlink()


def test_as_many_files_as_an_agent_likes_do_not_fill_the_memory(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5000):
        (inside / "real" / f"{number:05}").touch()

    def most() -> int:
        tracemalloc.start()
        try:
            with (tmp_path / "archive").open("wb") as archive, suppress(OSError):
                files.pack(SandboxPath(inside, ("real",)), archive, 16 << 20)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert most() < 1 << 20  # the names, and not their headers
    monkeypatch.setattr(files, "MAX_ENTRIES", 100)
    assert most() < 200 << 10  # and no more names than are packed
