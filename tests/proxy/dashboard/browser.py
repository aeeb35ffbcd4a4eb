"""Debian's chromium at a dashboard: the command that serves a pool, and the walks of walk.py through its pages."""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


def walk(address: str, what: str, seconds: int = 280, **task: Any) -> Any:
    """What the browser saw."""
    given = msgspec.json.encode({"address": address, "do": what, **task}).decode()
    done = subprocess.run([python(), WALK, given], capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stderr[-3000:]
    return msgspec.json.decode(done.stdout.splitlines()[-1])


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
