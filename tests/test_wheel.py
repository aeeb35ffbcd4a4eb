"""The wheel, as somebody has it who has no source tree: all files are in it, and the quickstart runs from it."""

import json
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from proxy.engine.process import free_port
from proxy.engine.tiny_model import make_tiny_model
from tests.test_house import module_names
from tests.test_pages import block_of

ROOT = Path(__file__).parent.parent
PACKAGES = ("proxy", "harness", "trainer", "sandboxes")
SCRIPT = "def answer(prompt, ids):\n    return 'from the wheel'\n"
AGENT = """\
import os
from urllib.request import Request, urlopen

headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
body = b'{"model": "any", "messages": [{"role": "user", "content": "hi"}]}'
urlopen(Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
"""
BODY = '{"model": "any", "messages": [{"role": "user", "content": "hi"}]}'
TASK = {"id": "look", "instruction": "Look around.", "timeout": 60, "verifier": {"command": "true"}}


def tracked(*names: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of the tracked files, built beside them, so that the build leaves nothing here."""
    source, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked(*PACKAGES, "pyproject.toml", "README.md", "LICENSE"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(dist)]
    subprocess.run([*build, str(source)], check=True, cwd=dist)
    (built,) = dist.glob("*.whl")
    return built


class Elsewhere:
    """An environment that has the wheel, and a directory without the sources.

    Its libraries are those of this environment, or come from the package index in the versions of constraints.txt.
    """

    def __init__(self, home: Path, wheel: Path, index: bool = False):
        self.home, self.bin = home, home / "venv" / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home / "venv"], check=True)
        if index:
            self.installs(str(wheel))
        else:
            own = next((home / "venv" / "lib").glob("python*/site-packages"))
            libraries = [path for path in sys.path if path.endswith("-packages")]
            (own / "libraries.pth").write_text("\n".join(libraries))  # .pth files in those, as our own, are not read
            self.installs("--no-deps", "--no-index", "--ignore-installed", str(wheel))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.env = kept | {"PATH": f"{self.bin}:{os.environ['PATH']}"}
        self.started: list[subprocess.Popen[str]] = []

    def installs(self, *words: str) -> None:
        install = [sys.executable, "-m", "pip", f"--python={self.bin / 'python'}", "install", "-q"]
        subprocess.run([*install, "-c", str(ROOT / "constraints.txt"), *words], check=True, cwd=self.home)

    def runs(self, *words: str | Path) -> str:
        done = subprocess.run(words, cwd=self.home, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def starts(self, *words: str) -> str:
        """Start a command that serves, and return the first address that it prints once it is ready."""
        process = subprocess.Popen(words, cwd=self.home, env=self.env, stdout=subprocess.PIPE, text=True)
        self.started.append(process)
        assert process.stdout is not None
        addresses = []
        for line in process.stdout:
            if found := re.match(r"(?:open|ready:) (http\S+)", line):
                addresses.append(found[1])
            if line.startswith("ready:"):
                return addresses[0]
        raise AssertionError(f"{words} ended with {process.wait()}")

    def ends(self) -> None:
        """End what was started."""
        for process in self.started:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Iterator[Elsewhere]:
    place = Elsewhere(tmp_path_factory.mktemp("elsewhere"), wheel)
    yield place
    place.ends()


@pytest.fixture
def clean(tmp_path: Path, wheel: Path) -> Iterator[Elsewhere]:
    """An environment without any extra, so without torch."""
    place = Elsewhere(tmp_path, wheel, index=True)
    yield place
    place.ends()


def test_the_wheel_holds_the_files_of_the_packages_and_nothing_else(wheel: Path) -> None:
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert {"proxy/dashboard/static/app.js", "proxy/pool/migrations/script.py.mako", "trainer/loop.py"} <= held
    assert held == set(tracked(*PACKAGES))


@pytest.mark.long
def test_the_quickstart_runs_from_the_wheel_without_the_sources(elsewhere: Elsewhere) -> None:
    elsewhere.runs("proxy", "tiny-model", "runs/tiny")
    quickstart(elsewhere)


def quickstart(elsewhere: Elsewhere) -> None:
    """Serve a script with the model in runs/tiny, run a task, look at the pool and at the dashboard."""
    where = elsewhere.runs(elsewhere.bin / "python", "-c", f"import {', '.join(PACKAGES)}; print(proxy.__file__)")
    assert where.startswith(str(elsewhere.home / "venv"))
    settings = block_of("README.md", "runs/serve.toml").replace("8000", str(free_port()))
    (elsewhere.home / "runs" / "serve.toml").write_text(settings.replace("30000", str(free_port())))
    (elsewhere.home / "script.py").write_text(SCRIPT)
    engine = elsewhere.starts("proxy", "engine", "runs/serve.toml", "--scripted", "script.py:answer")
    proxy = elsewhere.starts("proxy", "serve", "runs/serve.toml", "--engine", engine)
    headers = {"Content-Type": "application/json", "Authorization": "Bearer any-name"}
    with urlopen(Request(f"{proxy}/v1/chat/completions", BODY.encode(), headers), timeout=60) as answer:
        assert json.load(answer)["choices"][0]["message"]["content"] == "from the wheel"
    (elsewhere.home / "tasks.jsonl").write_text(json.dumps(TASK))
    (elsewhere.home / "agent.py").write_text(AGENT)
    agent = ["--agent", "command", "--command", f"{elsewhere.bin}/python {elsewhere.home}/agent.py"]
    run = ["harness", "run", "tasks.jsonl", "--sandbox", "process", *agent]
    elsewhere.runs(*run, "--proxy", proxy, "-n", "1", "--run-dir", "runs/one")
    assert "from the wheel" in elsewhere.runs("proxy", "pool", "show", "runs/pool.db", "1")
    assert "no damages" in elsewhere.runs("proxy", "pool", "verify", "runs/pool.db")
    address = elsewhere.starts("proxy", "dashboard", "runs/pool.db")
    base, _, token = address.partition("?token=")
    for name in ("app.js", "uplot/uPlot.esm.js", "api/runs"):
        with urlopen(Request(base + name, headers={"Authorization": f"Bearer {token}"}), timeout=30) as answer:
            assert answer.status == 200 and answer.read()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_quickstart_runs_with_the_libraries_that_the_wheel_brings(clean: Elsewhere) -> None:
    """But for `proxy tiny-model`, which needs torch, of the extra `trainer`: the model is made by this environment."""
    names = [name for package in ("proxy", "harness", "sandboxes") for name in module_names(package)]
    modules = [name for name in names if ".engine.cpu" not in name and ".migrations" not in name]
    assert len(modules) > 300
    imports: list[str | Path] = [clean.bin / "python", "-c", f"import {', '.join(modules)}"]
    done = subprocess.run(imports, cwd=clean.home, env=clean.env, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    make_tiny_model(clean.home / "runs" / "tiny")
    quickstart(clean)
    clean.installs("numpy")  # of the extra `trainer`, all that its help needs; the ranks need torch and Megatron, too
    for command in PACKAGES:
        assert clean.runs(command, "--help").startswith(f"usage: {command} ")


@pytest.mark.long
@pytest.mark.parametrize("command", PACKAGES)
def test_each_command_of_the_wheel_prints_the_version_of_pyproject(elsewhere: Elsewhere, command: str) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert elsewhere.runs(command, "--version") == f"blackforge {version}\n"
    assert elsewhere.runs(command, "--help").startswith(f"usage: {command} ")


@pytest.mark.long
def test_the_native_agent_is_whole_in_the_wheel(elsewhere: Elsewhere) -> None:
    code = "from harness.agents.native_agent import SOURCE; print(*sorted(file.name for file in SOURCE.glob('*.py')))"
    names = sorted(file.name for file in (ROOT / "harness" / "agents" / "native").glob("*.py"))
    assert elsewhere.runs(elsewhere.bin / "python", "-c", code).split() == names
