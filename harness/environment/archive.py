"""Unpacks the archive of an untrusted sandbox, or lists one, with code of our own that runs outside of any sandbox.

Regular files and directories become what they are, of modes only the executable bit stays, and owners are not read. A
link stays where it leads nowhere but below the unpacked directory, and where the same link was there before the agent;
absolute links that lead below it become relative. Everything else is left out and listed: other links, FIFOs, sockets,
devices, sparse files, names that are no UTF-8 or hold a line break, and what lies deeper than DEEPEST.
"""

import hashlib
import os
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Literal, Self

MAX_ENTRIES = 200_000
DEEPEST = 100
LONGEST = 3000
"""Bytes of a path. Linux takes 4096, and the directory that it is put into has a path too."""
HEADER_BYTES = 1 << 20
"""Maximum size of a tar member's name or other attributes, which are read into memory at once."""
_CHUNK = 1 << 20


class TooMuch(Exception):
    """An archive holds more than the bounds allow. The message is one sentence."""


@dataclass(frozen=True)
class Entry:
    """One file, directory or link."""

    kind: Literal["file", "directory", "link"]
    content: str = ""
    """Digest of a file's content, or what a link names."""
    executable: bool = False


@dataclass
class Unpacked:
    """What an archive held. The path of the packed file or directory itself is the empty text."""

    entries: dict[str, Entry] = field(default_factory=dict)
    times: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Path of a file -> its size, and its mtime in whole seconds."""
    left_out: list[str] = field(default_factory=list)


class _Member(tarfile.TarInfo):
    """A tar header that may be forged."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        member = super().frombuf(buf, encoding, errors)
        if member.size > HEADER_BYTES and member.type not in (*tarfile.REGULAR_TYPES, tarfile.GNUTYPE_SPARSE):
            raise tarfile.ReadError(f"a header of {member.size} bytes")
        return member


def unpack(archive: IO[bytes], target: Path | None, root: str, known: Mapping[str, Entry], limit: int) -> Unpacked:
    """Unpack an archive to `target`, which does not exist yet, or only list it (None).

    `root` is the packed path as the sandbox sees it, `known` what was at the same place before the agent. TooMuch
    beyond `limit` bytes or MAX_ENTRIES.
    """
    result, links, left = Unpacked(), dict[str, str](), limit
    with tarfile.open(fileobj=archive, mode="r:", tarinfo=_Member, errors="surrogateescape") as tar:
        for number, (name, member) in enumerate(_named(tar)):
            if number >= MAX_ENTRIES:
                raise TooMuch(f"{root} holds more than {MAX_ENTRIES} files")
            if not _fit(name) or member.issparse():
                result.left_out.append(_shown(name))
            elif member.isdir():
                result.entries[name] = Entry("directory")
                if target is not None:
                    (target / name).mkdir(parents=True, exist_ok=True)
            elif member.issym():
                links[name] = member.linkname
            elif member.isreg() or member.islnk():
                left -= _add_file(tar, member, name, target, result, left, root)
            else:
                result.left_out.append(name)
    _add_links(links, target, PurePosixPath(root), known, result)
    return result


def _named(tar: tarfile.TarFile) -> Iterator[tuple[str, tarfile.TarInfo]]:
    """Yield each member with its path below what was packed."""
    for member in tar:
        yield member.name.rstrip("/").partition("/")[2], member
        tar.members.clear()  # type: ignore[attr-defined]  # the library keeps every header it has read


def _fit(name: str) -> bool:
    """Whether a path may be written, here and in the verifier's sandbox."""
    parts = name.split("/") if name else []
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return False
    odd = any(part in ("", ".", "..") or len(part.encode()) > 255 for part in parts)
    return not odd and size <= LONGEST and len(parts) <= DEEPEST and not any(ord(sign) < 32 for sign in name)


def _shown(name: str) -> str:
    return name.encode(errors="backslashreplace").decode()[:LONGEST]


def _add_file(
    tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, target: Path | None, into: Unpacked, left: int, root: str
) -> int:
    """Add a regular file, or another name of one that came before, and return its bytes."""
    first = member.linkname.partition("/")[2]
    if member.islnk() and (into.entries.get(first) or Entry("link")).kind != "file":
        into.left_out.append(name)
        return 0
    size = into.times[first][0] if member.islnk() else member.size
    if size > left:
        raise TooMuch(f"the files of {root} hold more than may be carried")
    executable = into.entries[first].executable if member.islnk() else bool(member.mode & 0o111)
    if member.islnk() and target is None:
        digest = into.entries[first].content
    else:
        source = (target / first).open("rb") if member.islnk() and target else tar.extractfile(member)
        assert source is not None
        with source:
            digest = _copied(source, target and target / name, executable)
    into.entries[name] = Entry("file", digest, executable)
    into.times[name] = size, int(member.mtime)
    return size


def _copied(source: IO[bytes], target: Path | None, executable: bool) -> str:
    """Copy a file's content, where there is a target, and return its digest."""
    digest = hashlib.sha256()
    copy = None
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o755 if executable else 0o644)
        copy = os.fdopen(opened, "wb")
    try:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            if copy is not None:
                copy.write(chunk)
    finally:
        if copy is not None:
            copy.close()
    return digest.hexdigest()


def _add_links(
    links: Mapping[str, str], target: Path | None, root: PurePosixPath, known: Mapping[str, Entry], into: Unpacked
) -> None:
    """Add the links that may stay, after all files, so that nothing is written through one."""
    for name, leads_to in links.items():
        stays = (
            leads_to if known.get(name) == Entry("link", leads_to) or target is None else _inside(name, leads_to, root)
        )
        below_link = any(str(parent) in links for parent in PurePosixPath(name).parents)
        if stays is None or below_link or (target is not None and os.path.lexists(target / name)):
            into.left_out.append(_shown(name))
            continue
        into.entries[name] = Entry("link", stays)
        if target is not None:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).symlink_to(stays)


def _inside(name: str, leads_to: str, root: PurePosixPath) -> str | None:
    """What a link may name so that it stays below the root; None when it leads elsewhere.

    `..` is accepted at the beginning only: after another link it would mean a different directory than it seems to.
    """
    depth = len(PurePosixPath(name).parts) - 1
    parts = leads_to.split("/")
    if not name or "\0" in leads_to or not leads_to or len(leads_to.encode(errors="replace")) > LONGEST:
        return None
    if leads_to.startswith("/"):
        below = PurePosixPath(leads_to)
        if not below.is_relative_to(root) or ".." in below.parts:
            return None
        return "/".join([*[".."] * depth, *below.relative_to(root).parts]) or "."
    ups = 0
    while ups < len(parts) and parts[ups] in ("..", "."):
        ups += 1
    return leads_to if parts[:ups].count("..") <= depth and ".." not in parts[ups:] else None
