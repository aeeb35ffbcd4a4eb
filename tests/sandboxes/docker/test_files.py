"""Files into and out of read-only containers, past whatever an agent has planted."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from sandboxes.base import SandboxError
from sandboxes.docker.container import restore
from sandboxes.docker.container.files import unpack
from sandboxes.docker.container.sandbox import DockerSandbox
from tests.sandboxes.docker.conftest import says
from tests.sandboxes.docker.test_run import either

__all__ = ["either"]


async def test_what_is_written_is_read_back(either: DockerSandbox) -> None:
    await either.write("deep/er/text", "a\nb")
    await either.write("~/bytes", bytes(range(256)) * 4)
    assert await either.read("deep/er/text") == b"a\nb"
    assert await either.read("~/bytes", limit=300) == (bytes(range(256)) * 2)[:300]
    assert await either.read("nothing") is None and await either.read("deep") is None
    await either.write("deep/er", "no directory any more")
    assert await says(either, "cat deep/er; stat -c %u deep") == "no directory any more10000"


async def test_big_files_go_in_and_out(strict: DockerSandbox) -> None:
    content = os.urandom(30 << 20)
    await strict.write("big", content)
    assert await strict.read("big", limit=1 << 30) == content
    with pytest.raises(SandboxError, match="No space left"):
        await strict.write("bigger", bytes(60 << 20))


async def test_planted_links_are_replaced_and_not_followed(either: DockerSandbox) -> None:
    await says(either, "mkdir ~/other; echo mine >~/other/f; ln -s ~/other dir; ln -s ~/other/f link")
    await either.write("dir/f", "ours")
    await either.write("link", "ours")
    assert await says(either, "cat ~/other/f dir/f link") == "mine\noursours"
    await says(either, "ln -s ~/other/f trap")
    assert await either.read("trap") is None


async def test_a_fifo_holds_up_nobody(either: DockerSandbox) -> None:
    await says(either, "mkfifo pipe; mkdir d; mkfifo d/pipe; echo x >d/file")
    assert await either.read("pipe") is None
    await either.write("pipe", "a file now")
    assert await either.read("pipe") == b"a file now"


async def test_directories_are_copied_in_and_out(either: DockerSandbox, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / "empty").mkdir(parents=True)
    (source / "sub" / "run.sh").write_text("echo ran\n")
    (source / "sub" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("sub/run.sh")
    (source / "twin").hardlink_to(source / "sub" / "run.sh")
    await says(either, "mkdir -p ~/other tests; ln -s ~/other tests/sub; mkfifo tests/pipe")
    await either.put(source, "tests")
    assert await says(either, "ls ~/other; tests/link; stat -c %u tests/sub/run.sh") == "ran\n10000"
    await either.get("tests", tmp_path / "back")
    assert (tmp_path / "back/sub/run.sh").read_text() == "echo ran\n"
    assert (tmp_path / "back/sub/run.sh").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "back/link").readlink() == Path("sub/run.sh")
    assert (tmp_path / "back/twin").read_text() == "echo ran\n"
    assert not (tmp_path / "back/pipe").exists()


async def test_a_directory_whose_name_is_no_utf_8_is_copied_in(strict: DockerSandbox, tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/\xff")
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff")) / "file").write_text("hi")
    await strict.put(tmp_path, "odd")
    assert await says(strict, "cat odd/*/file; python3 -c \"import os; print(os.listdir(b'odd'))\"") == "hi[b'\\xff']"


async def test_what_cannot_be_copied_is_told(strict: DockerSandbox, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="no directory /work/nothing"):
        await strict.get("nothing", tmp_path / "back")
    with pytest.raises(SandboxError, match="cannot be read to be copied"):
        await strict.put(tmp_path / "nothing", "x")
    await says(strict, "truncate -s 80M sparse")  # a file that is larger than the disk that it is on
    with pytest.raises(SandboxError, match="holds more than 64 MB"):
        await strict.get(".", tmp_path / "back")


@pytest.mark.parametrize("path", ["", "..", "a/../../b", "~/", "~//etc/x", "a\0b"])
async def test_a_path_that_leads_out_is_refused(strict: DockerSandbox, path: str) -> None:
    with pytest.raises(SandboxError, match="must lead into the sandbox"):
        await strict.write(path, "x")


def test_a_crafted_archive_writes_nothing_outside(tmp_path: Path) -> None:
    outside, archive = tmp_path / "outside", io.BytesIO()
    outside.mkdir()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, link in (("way", str(outside)), ("up", "../outside"), ("ok", "file")):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, link
            tar.addfile(member)
        for name in ("way/a", "up/b", "../outside/c", f"{outside}/d", "file"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
        member = tarfile.TarInfo("hard")
        member.type, member.linkname = tarfile.LNKTYPE, str(outside / "secret")
        tar.addfile(member)
    archive.seek(0)
    unpack(archive, tmp_path / "target")
    assert list(outside.iterdir()) == []
    assert (tmp_path / "target/ok").read_text() == "x"
    assert not (tmp_path / "target/hard").exists()


def test_a_forged_archive_is_not_larger_than_it_looks(tmp_path: Path) -> None:
    forged = tarfile.TarInfo("sparse")
    content = b"1\n0\n0\n".ljust(tarfile.BLOCKSIZE, b"\0")
    forged.size, size = len(content), str(1 << 40)
    forged.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": size}
    with io.BytesIO() as archive:
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.addfile(forged, io.BytesIO(content))
            tar.addfile(tarfile.TarInfo("file"))
        archive.seek(0)
        unpack(archive, tmp_path / "target")
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["file"]


async def test_a_forged_archive_is_refused_in_a_sentence(harbor: DockerSandbox, tmp_path: Path) -> None:
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, 2 << 20  # is read into memory before anything of it is looked at
    sparse = tarfile.TarInfo("sparse")
    sparse.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "1"}
    for header, content in ((name.tobuf(), b"x" * (2 << 20)), (sparse.tobuf(tarfile.PAX_FORMAT), b"")):
        await harbor.write("/usr/bin/forged", header + content)
        await harbor.write("/usr/bin/tar", "#!/bin/sh\ncat /usr/bin/forged\n")
        await says(harbor, "chmod +x /usr/bin/tar; mkdir -p files")
        with pytest.raises(SandboxError, match="files .*cannot be unpacked"):
            await harbor.get("files", tmp_path / "back")


async def test_a_replaced_head_does_not_fill_our_memory(harbor: DockerSandbox) -> None:
    await harbor.write("file", "text")
    await says(harbor, r"printf '#!/bin/sh\nexec dd if=/dev/zero bs=1M count=4\n' >/usr/bin/head")
    with pytest.raises(SandboxError, match="file .*gave more than the 10 bytes that were asked for, so its head"):
        await harbor.read("file", limit=10)


async def test_restoring_what_an_agent_touched_is_bounded_work(
    harbor: DockerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SandboxError, match="5001 files of .* were changed, and at most 5000 are restored"):
        await harbor.restore([f"/usr/bin/{number}" for number in range(5001)])
    await says(harbor, "rm /usr/bin/env")
    monkeypatch.setattr(restore, "SECONDS", 0.0)
    with pytest.raises(SandboxError, match="restoring files of .* took more than 0 s"):
        await harbor.restore(["/usr/bin/env"])
    with pytest.raises(SandboxError, match="listing the changes of .* took more than 0 s"):
        await harbor.changed()
    monkeypatch.undo()
    await harbor.restore(["/usr/bin/env"])
    assert await says(harbor, "env true") == ""


async def test_a_removed_directory_is_restored_up_to_a_limit(
    harbor: DockerSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = "cd /usr/lib/python3.11 && find . -type f | xargs cat | wc -c"
    whole = await says(harbor, size)
    await says(harbor, "rm -rf /usr/lib/python3.11")
    monkeypatch.setattr(restore, "MAX_BYTES", 1000)
    with pytest.raises(SandboxError, match=r"python3\.11 of .* is not restored .*holds more than 0 MB\); use"):
        await harbor.restore(["/usr/lib/python3.11"])
    monkeypatch.undo()
    await harbor.restore(["/usr/lib/python3.11"])
    assert await says(harbor, size) == whole
    with pytest.raises(SandboxError, match="there is no /usr/lib/nothing in "):
        await harbor.restore(["/usr/lib/nothing"])
