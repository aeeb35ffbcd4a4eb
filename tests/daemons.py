"""Docker daemons of a test's own, beside the one that all tests share: to be killed, filled up, or one of several.

Each has its own directories, socket, and network and mount namespaces, so that it touches neither the bridge nor the
firewall of another, and its mounts are gone with it. It has no network for containers.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sandboxes.network import relay
from tests.conftest import need

START_SECONDS = 120


class OwnDaemon:
    """A dockerd with the image bb:1."""

    def __init__(self, home: Path, disk_mb: int | None = None, remapped: bool = False, bridge: bool = False):
        self.home, self._disk_mb, self._remapped, self._bridge = home, disk_mb, remapped, bridge
        self.address = f"unix://{home}/docker.sock"
        self._dockerd: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Up, as the daemon of the same directories as before."""
        home = self.home
        for left in ("docker.pid", "run/containerd/containerd.pid"):  # may name a zombie, which passes for alive
            (home / left).unlink(missing_ok=True)
        places = [f"--{name}={home / path}" for name, path in PLACES.items()] + [f"--host={self.address}"]
        options = ["--iptables=false", "--ip6tables=false", "--storage-driver=overlay2", *places]
        options += [] if self._bridge else ["--bridge=none"]
        disk = f"mount -t tmpfs -o size={self._disk_mb}m tmpfs {home}/data && " if self._disk_mb else ""
        (home / "data").mkdir(exist_ok=True)
        if self._remapped:
            (home / "subordinate").write_text("nobody:300000:65536\nnogroup:300000:65536\n")
            disk += "".join(f"mount --bind {home}/subordinate /etc/sub{kind}id && " for kind in "ug")
            options.append("--userns-remap=nobody:nogroup")
        self._dockerd = subprocess.Popen(
            ["unshare", "-n", "-m", "--propagation", "private", "sh", "-c", f'{disk}exec dockerd "$@"', "sh", *options],
            stdin=subprocess.DEVNULL,
            stdout=(home / "log").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + START_SECONDS
        while subprocess.run([*self.docker, "version"], capture_output=True).returncode:
            assert self._dockerd.poll() is None and time.monotonic() < deadline, (home / "log").read_text()[-3000:]
            time.sleep(0.1)

    @property
    def docker(self) -> list[str]:
        return ["docker", "--host", self.address]

    def say(self, *arguments: str) -> str:
        """What `docker ARGUMENTS` prints."""
        return said(*self.docker[1:], *arguments)

    def kill(self) -> None:
        """As a crash does: its containers live on."""
        assert self._dockerd is not None
        self._dockerd.kill()
        self._dockerd.wait()

    def hang(self) -> None:
        """As a daemon that waits for a disk does: it takes connections and answers nothing."""
        assert self._dockerd is not None
        self._dockerd.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._dockerd is not None
        self._dockerd.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Down, with everything that it started."""
        if self._dockerd is not None and self._dockerd.poll() is None:
            self.go_on()
            with suppress(subprocess.CalledProcessError):
                if left := self.say("ps", "--all", "--quiet").split():
                    self.say("rm", "--force", *left)
            self._dockerd.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._dockerd.wait(60)
            self._dockerd.kill()
            self._dockerd.wait()
        for process in Path("/proc").glob("[0-9]*"):  # containerd and shims, where dockerd was killed
            with suppress(OSError):
                if str(self.home).encode() in (process / "cmdline").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)


PLACES = {"data-root": "data", "exec-root": "run", "pidfile": "docker.pid"}


def said(*arguments: str) -> str:
    """What `docker ARGUMENTS` prints."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, check=True).stdout.strip()


@contextmanager
def own_daemon(disk_mb: int | None = None, remapped: bool = False, bridge: bool = False) -> Iterator[OwnDaemon]:
    """A running daemon of the test's own, on a disk of this size (in memory) if one is given. Remapped: its containers'
    root is user 300000 outside. Bridge: containers may have a network, which leads nowhere."""
    need("dockerd, as root (apt-get install docker.io)", shutil.which("dockerd") is not None and os.geteuid() == 0)
    home = Path(tempfile.mkdtemp(prefix="bfd-"))  # a socket's path may have 108 characters
    home.chmod(0o755)
    daemon = OwnDaemon(home, disk_mb, remapped, bridge)
    try:
        daemon.start()
        image = subprocess.run(["docker", "save", "bb:1"], capture_output=True, check=True).stdout
        subprocess.run([*daemon.docker, "load"], input=image, capture_output=True, check=True)
        yield daemon
    finally:
        daemon.stop()
        shutil.rmtree(home, ignore_errors=True)


class Way:
    """The only way to a daemon for one client, so that the daemon can be gone for it and for nobody else."""

    def __init__(self, place: Path, daemon: str):
        self.address = f"unix://{place}/way.sock"
        self._command = [sys.executable, "-I", "-S", relay.__file__, f"unix:{place}/way.sock"]
        self._command.append(daemon.replace("unix://", "unix:"))
        self.open()

    def open(self) -> None:
        self._relay = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None and self._relay.stdout.readline() == "ready\n"

    def send(self, what: signal.Signals) -> None:
        self._relay.send_signal(what)

    def close(self) -> None:
        self._relay.kill()
        self._relay.communicate()


def command_lines() -> Iterator[str]:
    """Those of all processes of this machine."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            yield file.read_bytes().decode(errors="replace").replace("\0", " ")


@pytest.fixture(scope="module")
def second_daemon(docker_daemon: str) -> Iterator[OwnDaemon]:
    """One more host."""
    with own_daemon() as daemon:
        yield daemon
