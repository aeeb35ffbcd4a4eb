"""A PostgreSQL of the recipe's own, from the binaries of this machine, for as long as the recipe runs.

It listens on a Unix socket only, in a directory that nobody else may enter. PostgreSQL refuses to run as root, so there
it runs as Debian's user `postgres`.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from proxy.pool.processes.parent import die_with_parent

USER = "blackforge"
PREFIX, LOCK = "blackforge-postgres-", "lock"
"""Of the servers' directories, and the file in each that its recipe keeps locked as long as it lives."""
SECONDS = 60
"""How long each of the server's programs may take to start or to end."""


def binaries() -> Path | None:
    """Return the directory of the newest PostgreSQL server that is installed. None: there is none."""
    on_path = shutil.which("initdb")
    directories = [Path(on_path).resolve().parent] if on_path else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return directories[-1] if directories else None


@contextmanager
def private_database(programs: Path, log: Path) -> Iterator[str]:
    """Run a server and give the URL of its empty database. SystemExit when it does not start.

    What a recipe left here that was killed is removed first. Its server has died with it.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        _remove_if_left(left)
    home = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = (home / LOCK).open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    other_user: dict[str, Any] = {}
    if os.geteuid() == 0:
        other_user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        shutil.chown(home, "postgres", "postgres")
    try:
        with log.open("ab") as output:
            start = partial(subprocess.Popen, cwd=home, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            make = [programs / "initdb", "-D", home / "data", "-U", USER, "--auth=trust", "--no-sync"]
            if start([*make, "-E", "UTF8", "--locale=C"], **other_user).wait(SECONDS):
                raise SystemExit(f"error: PostgreSQL could not make a database; see {log}")
            # Its data is removed with it, so it need not wait for the disk (-F).
            serve = [
                programs / "postgres",
                "-D",
                home / "data",
                "-k",
                home,
                "-c",
                "listen_addresses=",
                "-c",
                "fsync=off",
            ]
            preexec = partial(die_with_parent, signal.SIGQUIT)
            server = start(serve, start_new_session=True, preexec_fn=preexec, **other_user)
        try:
            _wait_until_ready(programs, home, server, log)
            yield f"postgresql://{USER}@/postgres?host={home}"
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(SECONDS)
    finally:
        shutil.rmtree(home)
        lock.close()


def _remove_if_left(home: Path) -> None:
    """Remove a server's directory unless a recipe holds its lock. That of another user stays."""
    with suppress(OSError), (home / LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(home)


def _wait_until_ready(programs: Path, home: Path, server: "subprocess.Popen[Any]", log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while subprocess.run([programs / "pg_isready", "-q", "-h", home]).returncode:
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"error: PostgreSQL did not start; see {log}")
        time.sleep(0.1)
