"""Debian's chromium at a dashboard: the command that serves a pool, and the walks of walk.py through its pages."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

import msgspec

from tests.conftest import need
from tests.proxy.sdks import environments

WALK = Path(__file__).parent / "walk.py"
CHROMIUM = Path("/usr/bin/chromium")
AXE = Path(__file__).parent / "axe"
EVERY_LOOK = [["desktop", False], ["desktop", True], ["phone", False], ["phone", True]]
"""Size, and whether it is dark."""


@contextmanager
def served(pool: str | Path, *options: str) -> Iterator[str]:
    """The address of a dashboard of a pool. `options`: further ones of the command."""
    command = [sys.executable, "-m", "proxy", "dashboard", str(pool), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("open ").strip()
        assert process.stdout.readline().startswith("ready: ")
        yield address
    finally:
        process.terminate()
        process.wait(30)


def python() -> Path:
    """The interpreter that has Playwright."""
    need("chromium (apt-get install chromium)", CHROMIUM.exists())
    found = environments.made("playwright")
    need("Playwright (python -m tests.proxy.sdks.environments playwright)", found is not None)
    assert found is not None
    return found


class Walker:
    """A process of walk.py. Its browser serves one test after another, as it takes seconds of two cores to start."""

    def __init__(self) -> None:
        command, pipe = [python(), WALK], subprocess.PIPE
        self._profile = TemporaryDirectory(ignore_cleanup_errors=True)
        env = os.environ | {"TMPDIR": self._profile.name}
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env, start_new_session=True)

    def begin(self, address: str, what: str, **task: Any) -> None:
        """Begin a walk."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode({"address": address, "do": what, **task}).decode() + "\n")
        self._process.stdin.flush()

    def line(self, seconds: float) -> str:
        """The next line. A walker that takes longer is ended, and so is its driver of the browser."""
        assert self._process.stdout is not None
        timer = threading.Timer(seconds, self.kill)
        timer.start()
        try:
            return self._process.stdout.readline().strip()
        finally:
            timer.cancel()

    def seen(self, seconds: float = 240) -> Any:
        """What the browser saw in the walk that was begun."""
        line = self.line(seconds)
        if not line:
            walker.cache_clear()
        assert line, f"the walk has not come to its end within {seconds} s"
        result = msgspec.json.decode(line)
        assert "error" not in result, result["error"]
        return result["seen"]

    def close(self) -> None:
        """Let the browser close."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:  # often: node 26 waits for itself when its browser ends (libuv's signal lock)
            self.kill()
            self._process.wait()
        self._profile.cleanup()

    def kill(self) -> None:
        """End it with its driver. The browser ends when its driver has."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


@cache
def walker() -> Walker:
    """The one of this process."""
    return Walker()


def walk(address: str, what: str, seconds: float = 240, **task: Any) -> Any:
    """What the browser saw."""
    walker().begin(address, what, **task)
    return walker().seen(seconds)


def close_browser() -> None:
    """Close the browser of this process, if there is one."""
    if walker.cache_info().currsize:
        walker().close()
        walker.cache_clear()


def axe() -> str:
    """The file of axe-core."""
    return str(environments.npm_packages(AXE) / "node_modules" / "axe-core" / "axe.min.js")


def wait_for_index(address: str, seconds: float = 120) -> None:
    """Wait until a dashboard has the whole pool in its search index. TimeoutError when it takes too long."""
    base, token = address.split("?")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with urlopen(f"{base}api/search/index?{token}", timeout=30) as response:
            progress = msgspec.json.decode(response.read())["progress"]
        if progress and progress["whole"] and progress["outcomes_whole"]:
            return
        time.sleep(0.2)
    raise TimeoutError(f"the search index is not whole after {seconds:.0f} s")


def demand_clean(seen: dict[str, Any]) -> None:
    """Nothing went wrong in a page, nothing of the pool ran, and nobody else was asked."""
    assert seen["troubles"] == [] and seen["alerts"] == [] and seen["elsewhere"] == [], seen
    assert seen["scripts"] == 0 and "owned" not in seen["title"] and not seen["too_wide"], seen
    assert "token=" not in seen["url"]
