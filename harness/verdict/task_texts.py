"""Reads the texts of the files that a task brings, within limits: a task's directory may hold gigabytes."""

import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

LONGEST = 1 << 16
"""Bytes of one file of a directory."""
MOST_FILES = 2000
MOST_BYTES = 8 << 20
"""Files of one directory that are read, and bytes of all of them."""
REST = "..."
"""Name of what stands in the place of a directory's further files."""


def texts_of(files: Mapping[str, str], directories: Mapping[str, str], digest: str) -> Iterator[tuple[str, str]]:
    """Yield a task's own files and those of its directories by their paths in the sandbox, as text.

    `digest`: of the directories' content. One that was read before is not read again. Empty: it is not known.
    """
    yield from files.items()
    for place, source in directories.items():
        for path, text in _remembered(source, digest) if digest else _read(source):
            yield f"{place.rstrip('/')}/{path}", text


@lru_cache(maxsize=32)  # some 256 MiB at most; all threads share it, as the texts depend on the digest alone
def _remembered(source: str, digest: str) -> tuple[tuple[str, str], ...]:
    return _read(source)


def _read(source: str) -> tuple[tuple[str, str], ...]:
    texts: list[tuple[str, str]] = []
    left = MOST_BYTES
    for path in _paths(source):
        if len(texts) == MOST_FILES or left <= 0:
            limits = f"{MOST_FILES} files or {MOST_BYTES >> 20} MiB"
            texts.append((REST, f"[further files are left out: of a directory at most {limits} are read]"))
            break
        text, size = _text(path)
        texts.append((str(path.relative_to(source)), text))
        left -= size
    return tuple(texts)


def _paths(source: str) -> Iterator[Path]:
    for directory, below, names in os.walk(source):
        below.sort()
        yield from (path for name in sorted(names) if (path := Path(directory, name)).is_file())


def _text(path: Path) -> tuple[str, int]:
    """What a file holds, or the beginning of it, and how many bytes were read."""
    try:
        with path.open("rb") as file:
            content, size = file.read(LONGEST + 1), os.fstat(file.fileno()).st_size
    except OSError as error:
        return f"[it cannot be read: {error.strerror}]", 0
    if b"\0" in content[:1000]:
        return f"[{size} bytes of data]", len(content)
    rest = f"\n[{size - LONGEST} bytes of this file are left out]" if len(content) > LONGEST else ""
    return content[:LONGEST].decode(errors="replace") + rest, len(content)
