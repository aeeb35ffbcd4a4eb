"""A real PostgreSQL for the tests: a server of its own in a temporary directory, from Debian's binaries.

It refuses to run as root, so there it runs as Debian's `postgres` user. It dies with the test session, fsync is off,
and its one user has a password, so that every test passes one.
"""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from proxy.engine.process import free_port
from proxy.pool.processes.parent import die_with_parent

USER = "blackforge"
MEMORY = Path("/dev/shm")
MOST_BYTES = 4 << 30
"""More than all databases of a test session take."""
START_SECONDS = 60


def binaries() -> Path | None:
    """The directory of the newest server binaries, if they and the driver are installed."""
    on_path = shutil.which("initdb")
    directories = [Path(on_path).resolve().parent] if on_path else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return directories[-1] if directories and find_spec("psycopg") else None


class Server:
    """A running server, which makes an empty database for whoever asks."""

    def __init__(self, port: int, password: str, launch: Callable[[], "subprocess.Popen[Any]"]):
        self.password = password
        self._launch = launch
        self._at = f"postgresql+psycopg://{USER}:{password}@127.0.0.1:{port}"
        self._numbers = count()

    def database(self, place: Path | None = None) -> str:
        """The URL of a new, empty database. `place`: an empty directory that holds it, the server's user's own."""
        name = f"test_{next(self._numbers)}"
        if place is None:
            self.execute(f"create database {name}")
        else:
            self.execute(f"create tablespace place_of_{name} location '{place}'")
            self.execute(f"create database {name} tablespace place_of_{name}")
        return f"{self._at}/{name}"

    def drop(self, url: str) -> None:
        """Remove a database that has a place, and take the place from the server."""
        name = url.rpartition("/")[2]
        self.execute(f"drop database {name} with (force)")
        self.execute(f"drop tablespace place_of_{name}")

    def start(self) -> None:
        """Up, and answering. A server that was killed has processes that still end, which refuse the new one."""
        deadline = time.monotonic() + START_SECONDS
        self._served = self._launch()
        while True:
            try:
                return self.execute("select 1")
            except OperationalError:
                assert time.monotonic() < deadline
            if self._served.poll() is not None:
                self._served = self._launch()
            time.sleep(0.05)

    def kill(self) -> None:
        """kill -9. What was committed is there again after `start`."""
        self._served.kill()
        self._served.wait()

    def stop(self) -> None:
        """Down at once; nothing of it is kept."""
        self._served.send_signal(signal.SIGQUIT)
        self._served.wait(START_SECONDS)

    def execute(self, statement: str) -> None:
        engine = create_engine(f"{self._at}/postgres", isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.execute(text(statement))
        engine.dispose()


@contextmanager
def running(installed: Path, durable: bool = False) -> Iterator[Server]:
    """A server for as long as the block lasts. `durable`: on disk and with fsync, as a user's is, and not quick."""
    # pytest's own directories are closed to other users; in memory, a hundred databases are made and removed at once
    roomy = not durable and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > MOST_BYTES
    home = Path(tempfile.mkdtemp(prefix="blackforge-postgres-", dir=MEMORY if roomy else None))
    password, port = secrets.token_hex(8), free_port()
    (home / "password").write_text(password)
    unprivileged: dict[str, Any] = {}
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        unprivileged = {"user": "postgres", "group": "postgres", "extra_groups": []}
        shutil.chown(home, "postgres", "postgres")
        shutil.chown(home / "password", "postgres")
    secret = ["-U", USER, "--auth=scram-sha-256", f"--pwfile={home}/password", "--no-sync", "-E", "UTF8", "--locale=C"]
    run = partial(subprocess.Popen, cwd=home, stdout=subprocess.DEVNULL, stderr=(home / "log").open("wb"))
    try:
        initdb = run([installed / "initdb", "-D", home / "data", *secret], **unprivileged)
        assert initdb.wait(START_SECONDS) == 0, (home / "log").read_text()
        options = ["-p", str(port), "-h", "127.0.0.1", "-k", home]
        # autovacuum visits each of hundreds of databases every minute; a test that needs statistics asks for them
        # and a log of a gigabyte, the most by default, would lie in memory
        quick = ["-F", "-c", "shared_buffers=16MB", "-c", "autovacuum=off", "-c", "max_wal_size=64MB"]
        options += ["-c", "shared_buffers=256MB"] if durable else quick
        command = [installed / "postgres", "-D", home / "data", *options]
        server = Server(port, password, partial(run, command, preexec_fn=die_with_parent, **unprivileged))
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(home)
