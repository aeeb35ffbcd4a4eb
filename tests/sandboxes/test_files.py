"""Files that go into and out of a sandbox's directory never pass a link that an agent has put in the way."""

from pathlib import Path

import pytest

from sandboxes import files
from sandboxes.files import Place


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
    assert files.read(Place(inside, ("away", "secret")), 99) is None
    assert files.read(Place(inside, ("real", "file")), 99) is None
    with pytest.raises(OSError):
        files.get(Place(inside, ("away",)), tmp_path / "copy")


def test_nothing_is_written_through_a_link(inside: Path, tmp_path: Path) -> None:
    files.write(Place(inside, ("away", "secret")), b"ours")
    files.write(Place(inside, ("real", "file")), b"ours")
    assert (inside / "away" / "secret").read_text() == (inside / "real" / "file").read_text() == "ours"
    assert (tmp_path / "outside" / "secret").read_text() == "secret"


def test_a_tree_is_copied_as_it_is(inside: Path, tmp_path: Path) -> None:
    (inside / "real" / "sub" / "empty").mkdir(parents=True)
    (inside / "real" / "sub" / "tool").write_text("#!")
    (inside / "real" / "sub" / "tool").chmod(0o755)
    files.get(Place(inside, ("real",)), tmp_path / "copy")
    (inside / "back").symlink_to(tmp_path / "outside")  # in the way of the copy that goes back
    files.put(tmp_path / "copy", Place(inside, ("back",)))
    back = inside / "back"
    assert not back.is_symlink() and (back / "sub" / "empty").is_dir() and (back / "file").is_symlink()
    assert (back / "sub" / "tool").read_text() == "#!" and (back / "sub" / "tool").stat().st_mode & 0o777 == 0o755
    assert [path.name for path in (tmp_path / "outside").iterdir()] == ["secret"]


def test_a_tree_that_has_gone_is_not_an_empty_one(inside: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        files.put(tmp_path / "gone", Place(inside, ("tests",)))
