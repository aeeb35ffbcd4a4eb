"""A bundle is known by its content, readable for everybody, and nothing before it is complete."""

from pathlib import Path

from sandboxes.bundles import MANIFEST, read_manifest, seal_bundle


def made(directory: Path, content: str = "print()", mode: int = 0o600) -> Path:
    (directory / "bin").mkdir(parents=True)
    (directory / "bin/program").write_text(content)
    (directory / "bin/program").chmod(mode)
    (directory / "program").symlink_to("bin/program")
    return directory


def test_a_bundle_without_its_manifest_or_with_half_of_it_is_none(tmp_path: Path) -> None:
    directory = made(tmp_path / "a")
    assert read_manifest(directory) is None
    sealed = seal_bundle(directory, "a", "1.0")
    assert read_manifest(directory) == sealed and (sealed.version, sealed.bytes) == ("1.0", 7)
    (directory / MANIFEST).write_bytes((directory / MANIFEST).read_bytes()[:20])
    assert read_manifest(directory) is None


def test_the_same_files_have_the_same_digest_wherever_they_lie_and_others_another(tmp_path: Path) -> None:
    first = seal_bundle(made(tmp_path / "a"), "a", "1.0").digest
    assert seal_bundle(made(tmp_path / "b"), "a", "1.0").digest == first
    assert seal_bundle(made(tmp_path / "c", content="quit()"), "a", "1.0").digest != first
    assert seal_bundle(made(tmp_path / "d", mode=0o700), "a", "1.0").digest != first
    other = made(tmp_path / "e")
    (other / "program").unlink()
    (other / "program").symlink_to("bin/../bin/program")
    assert seal_bundle(other, "a", "1.0").digest != first


def test_every_user_may_read_a_bundle(tmp_path: Path) -> None:
    directory = made(tmp_path / "a", mode=0o700)
    (directory / "bin").chmod(0o700)
    seal_bundle(directory, "a", "1.0")
    assert [(directory / part).stat().st_mode & 0o777 for part in ("bin", "bin/program")] == [0o755, 0o755]
