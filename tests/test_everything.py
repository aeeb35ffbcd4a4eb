"""The recipe in which everything runs together, and its page."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from examples.everything.database import private_database
from examples.everything.report import BY_NAME, POSITIVE, ZERO, absent
from tests import postgres
from tests.conftest import need
from tests.harness.test_agents import need_agent

ROOT = Path(__file__).parent.parent
FILES = ROOT / "examples" / "everything" / "files"


def test_the_page_shows_the_files_as_they_are() -> None:
    page = (ROOT / "docs" / "everything.md").read_text()
    shown = dict(re.findall(r"^## (\S+\.toml)$.*?^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert shown == {file.name: file.read_text() for file in FILES.glob("*.toml")}
    (task,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert json.loads(task) == json.loads((FILES / "agent.jsonl").read_text().splitlines()[0])
    named = {name for row in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert {*POSITIVE, *BY_NAME, *ZERO} <= named


def test_what_took_no_part_is_named() -> None:
    figures: dict[str, Any] = {name: 1 for name in POSITIVE} | {name: 0 for name in ZERO}
    figures |= {name: {part: 1 for part in parts or ("any",)} for name, parts in BY_NAME.items()}
    assert absent(figures) == []
    figures |= {"pushes": 0, "left_out": {}, "stale_rollouts": {}, "unaccounted": 1}
    figures["calls_by_dialect"]["gemini"] = 0
    assert absent(figures) == ["pushes", "left_out", "calls_by_dialect gemini", "stale_rollouts", "unaccounted"]


def test_a_machine_without_docker_is_told_before_anything_starts(tmp_path: Path) -> None:
    command = [sys.executable, "examples/everything/run.py", str(tmp_path / "everything")]
    environment = os.environ | {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "error: no Docker daemon answers; " in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "everything").exists()


@pytest.mark.long
def test_the_database_of_a_recipe_that_was_killed_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = postgres.binaries()
    need("PostgreSQL (apt-get install postgresql)", programs is not None)
    assert programs is not None
    kept = tempfile.mkdtemp()  # short, as a socket's path may have 107 characters; postgres must reach it
    os.chmod(kept, 0o755)
    monkeypatch.setenv("TMPDIR", kept)
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = f"""
import time
from pathlib import Path
from examples.everything.database import private_database
with private_database(Path({str(programs)!r}), Path({str(tmp_path / "log")!r})) as url:
    print(url, flush=True)
    time.sleep(600)
"""
    try:
        killed = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert killed.stdout is not None and killed.stdout.readline().startswith("postgresql://")
        (living,) = Path(kept).iterdir()
        with private_database(programs, tmp_path / "other-log"):
            assert living.exists()  # its recipe lives
            killed.kill()
            killed.communicate()
        assert list(Path(kept).iterdir()) == [living]
        with private_database(programs, tmp_path / "log") as url:
            (home,) = Path(kept).iterdir()
            assert home != living and url.endswith(str(home))
        assert list(Path(kept).iterdir()) == []
    finally:
        shutil.rmtree(kept)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_part_takes_part(docker_daemon: str, tmp_path: Path) -> None:
    need("sglang and megatron-core", find_spec("sglang") is not None and find_spec("megatron") is not None)
    need("PostgreSQL (apt-get install postgresql)", postgres.binaries() is not None)
    for agent in ("mini-swe-agent", "codex"):
        need_agent(agent)
    command = [sys.executable, "examples/everything/run.py", str(tmp_path / "everything")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "everything" / "report.json").read_text())
    for name in POSITIVE:
        value = figures[name]
        assert all(number > 0 for number in (value.values() if isinstance(value, dict) else [value])) and value, name
    for name, parts in BY_NAME.items():
        assert {*parts} <= {part for part, number in figures[name].items() if number > 0} and figures[name], name
    assert figures["database"].startswith("PostgreSQL ") and figures["engine"].startswith("SGLang ")
    assert figures["unaccounted"] == figures["damages"] == 0
    assert figures["pushes"] == figures["steps"] + 1 == 7  # with the initial weights
