"""Exit 0 when the service as it was shipped (the copy in /tests) works with the agent's configuration."""

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

URL = "http://127.0.0.1:8080"
LOG = Path("/var/log/notes/service.log")


def get(path):
    """The text at a path of the service; None while nothing answers."""
    try:
        with urllib.request.urlopen(URL + path, timeout=5) as reply:
            return reply.read().decode()
    except (urllib.error.URLError, OSError):
        return None


if get("/health") is not None:
    sys.exit("something else answers on port 8080 already")
service = subprocess.Popen([sys.executable, "-I", "/tests/service.py", "/app/service.json"])
try:
    deadline = time.monotonic() + 30
    while get("/health") != "ok":
        if service.poll() is not None or time.monotonic() > deadline:
            sys.exit("the service does not come up")
        time.sleep(0.05)
    Path("/app/notes/probe.txt").write_text("seen")
    assert get("/notes") == "errands\nprobe\nsea", get("/notes")
    assert get("/notes/probe") == "seen"
    assert "/notes/probe" in LOG.read_text()
finally:
    service.kill()
