"""A run's directory: nobody but its owner can read it."""

from pathlib import Path

from harness.run_dir import RunDir


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


def test_a_directory_that_others_use_keeps_its_mode(tmp_path: Path) -> None:
    for name, mode in (("empty", 0o755), ("everybodys", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    (tmp_path / "everybodys" / "run.json").write_text("{}")
    for name, mode in (("empty", 0o755), ("everybodys", 0o777)):
        with RunDir(tmp_path / name).locked():
            assert modes(tmp_path / name) == mode
