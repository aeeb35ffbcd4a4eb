"""Bundles: directories that every sandbox may read and none may change, such as an agent with its interpreter.

A bundle exists once its manifest is written, which is the last step of creating one, on this machine and in a Docker
volume alike. Left out: how a bundle is filled (`harness agents install`).
"""

import hashlib
import os
import stat
from pathlib import Path

import msgspec

AGENTS = "/opt/blackforge/agents"
"""Directory of the agents in a sandbox with its own file system: each agent's files are below it, under its name."""
RUNTIME = "/opt/blackforge/runtime"
"""Directory of Python and Node.js in such a sandbox. They need nothing of the image, not even a libc."""
PYTHON = f"{RUNTIME}/bin/python3"
NODE = f"{RUNTIME}/bin/node"
RUNTIME_NAME = "runtime"
"""Name of the runtime's bundle."""
MANIFEST = "blackforge-bundle.json"


class BundleManifest(msgspec.Struct, frozen=True):
    """Describes the content of a bundle; a file in its directory."""

    name: str
    version: str
    digest: str
    """SHA-256 in hexadecimal over names, modes and contents of its files."""
    bytes: int


def read_manifest(directory: Path) -> BundleManifest | None:
    """Read a bundle's manifest; None when there is no bundle, or only a part of one."""
    try:
        return msgspec.json.decode((directory / MANIFEST).read_bytes(), type=BundleManifest)
    except (OSError, msgspec.MsgspecError):
        return None


def seal_bundle(directory: Path, name: str, version: str) -> BundleManifest:
    """Make a complete bundle readable for every user, then write its manifest and return it."""
    digest, size = hashlib.sha256(), 0
    for path in sorted(directory.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | (0o555 if path.is_dir() or mode & 0o111 else 0o444))
        described, length = _described(path)
        digest.update(f"{path.relative_to(directory)}\0{described}\0".encode())
        size += length
    manifest = BundleManifest(name, version, digest.hexdigest(), size)
    (directory / MANIFEST).write_bytes(msgspec.json.encode(manifest))
    return manifest


def _described(path: Path) -> tuple[str, int]:
    """Return a file's description for the digest, and its length in bytes."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"-> {os.readlink(path)}", 0
    if not stat.S_ISREG(status.st_mode):
        return "directory", 0
    with path.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{status.st_mode & 0o111:o} {content}", status.st_size
