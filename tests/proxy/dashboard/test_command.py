"""The command `proxy dashboard`: it prints an address that works, and refuses in one sentence."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from proxy.commands.main import main
from proxy.pool.database import open_pool
from tests.proxy.dashboard.make import story

COMMAND = [sys.executable, "-m", "proxy", "dashboard"]


def test_the_printed_address_opens_the_pages_and_the_pool_stays_as_it_is(tmp_path: Path) -> None:
    pool = open_pool(str(tmp_path / "pool.db"))
    story(pool)
    pool.close()
    before = (tmp_path / "pool.db").read_bytes()
    process = subprocess.Popen([*COMMAND, str(tmp_path / "pool.db")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        matched = re.fullmatch(r"open (http://127\.0\.0\.1:\d+)/\?token=(\S+)\n", line)
        assert matched, line
        assert process.stdout.readline() == f"ready: {matched[1]}\n"
        with urlopen(f"{matched[1]}/api/runs?token={matched[2]}", timeout=30) as response:
            assert b'"name":"train"' in response.read()
        with pytest.raises(HTTPError, match="401"):
            urlopen(f"{matched[1]}/api/runs", timeout=30)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert (tmp_path / "pool.db").read_bytes() == before


def test_what_is_no_pool_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text").write_text("no pool")
    for name in ("none.db", "text"):
        assert main(["dashboard", str(tmp_path / name)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "none.db").exists()
