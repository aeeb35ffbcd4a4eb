"""A run's directory: nobody but its owner can read it."""

from pathlib import Path

from harness.run_dir import RunDir
from harness.settings import Settings


def modes(directory: Path) -> int:
    return directory.stat().st_mode & 0o777


def test_a_run_directory_is_its_owners_alone_also_one_of_an_earlier_run(tmp_path: Path) -> None:
    directory = RunDir(tmp_path / "runs" / "r")
    with directory.locked():
        assert modes(directory.path) == 0o700
        (directory.path / "run.json").write_text("{}")
    directory.path.chmod(0o755)
    with directory.locked():
        assert modes(directory.path) == 0o700


def test_a_directory_that_its_owner_made_before_the_first_run_becomes_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with RunDir(tmp_path).locked():
        assert modes(tmp_path) == 0o700


def test_a_directory_with_other_files_becomes_private_when_a_run_begins(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    tmp_path.chmod(0o755)
    directory = RunDir(tmp_path)
    with directory.locked():
        assert modes(tmp_path) == 0o755 and modes(directory.logs) == 0o700
        directory.begin({}, "run", Settings(tasks="tasks.jsonl"))
        assert modes(tmp_path) == 0o700


def test_a_directory_that_everybody_uses_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with RunDir(tmp_path).locked():
        assert modes(tmp_path) == 0o777
        (tmp_path / "run.json").write_text("{}")
    with RunDir(tmp_path).locked():
        assert modes(tmp_path) == 0o777
