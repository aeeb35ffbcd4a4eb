"""A run through a proxy that others can reach: it has an admin key, and the harness shows it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cli import main
from harness.setup.stack import RunningProxy, ask_health
from tests.harness.conftest import HELLO, SHELL_AGENT, results, write_tasks
from tests.proxy.test_secrets import running

KEY = "the-admin-key-of-this-run"


@pytest.fixture
def guarded(proxy: RunningProxy, tmp_path: Path) -> Iterator[str]:
    """The address of a proxy with an admin key, before the engine of the other tests' proxy."""
    (tmp_path / "admin.key").write_text(f"{KEY}\n")
    model = Path(proxy.pool.removeprefix("sqlite:///")).parent / "model"
    config = tmp_path / "proxy.toml"
    config.write_text(f'[engine]\nmodel = "{model}"\n[proxy]\nadmin_key_file = "admin.key"\n')
    with running(tmp_path / "proxy.log", "serve", config, "--engine", ask_health(proxy.url).engine.url) as (url, _):
        yield url


def test_a_run_shows_the_admin_key_and_no_agent_gets_it(guarded: str, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO)
    where = ["--run-dir", str(tmp_path / "run"), "--proxy", guarded, "--admin-key-file", str(tmp_path / "admin.key")]
    agent = f"env > {tmp_path}/seen; {SHELL_AGENT}"
    assert main(["run", str(tasks), "--agent", "command", "--command", agent, "--sandbox", "process", *where]) == 0
    assert [row["reward"] for row in results(tmp_path / "run")] == [1.0]
    seen = (tmp_path / "seen").read_text()
    assert "OPENAI_API_KEY=bf-" in seen and KEY not in seen


def test_without_the_key_the_sentence_names_the_option(
    guarded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", HELLO)
    words = [
        "run",
        str(tasks),
        "--agent",
        "command",
        "--command",
        "true",
        "--sandbox",
        "process",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert main([*words, "--proxy", guarded]) == 2
    assert "--admin-key-file" in capsys.readouterr().err
    assert main([*words, "--proxy", guarded, "--admin-key-file", str(tmp_path / "gone")]) == 2
    assert "the admin key cannot be read" in capsys.readouterr().err
