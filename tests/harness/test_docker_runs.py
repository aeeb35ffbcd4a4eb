"""Whole runs in containers: on two engines, with spare ones, and after kill -9 of the harness in the middle."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.agents.bundles.install import agents_directory
from harness.cli import main
from harness.setup.stack import RunningProxy
from proxy.commands.main import main as proxy_main
from proxy.pool.database import open_pool
from sandboxes.bundles import PYTHON, RUNTIME_NAME, read_manifest
from sandboxes.docker.labels import PID, labels_of, this_process
from tests.conftest import need
from tests.daemons import own_daemon, said
from tests.harness.conftest import HELLO, ROOT, results
from tests.harness.test_run import failures, start, wait_for

CommandLine = Callable[..., list[str]]
AGENT = f"{PYTHON} -I -S ~/agent.py"
TASK = HELLO | {"files": {"~/agent.py": (ROOT / "examples/agents/shell_agent.py").read_text()}}


@pytest.fixture
def in_docker(command_line: CommandLine, docker_daemon: str) -> CommandLine:
    need("the agents' runtime (harness agents install runtime)", bool(read_manifest(agents_directory() / RUNTIME_NAME)))

    def build(*more: str, command: str = AGENT, **what: Any) -> list[str]:
        return command_line("--sandbox", "docker", "--image", "bb:1", *more, tasks=[TASK], command=command, **what)

    return build


def containers_of(pid: int) -> list[str]:
    return said("ps", "--all", "--filter", f"label={PID}={pid}", "--format", "{{.Names}}").split()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_is_shared_out_over_two_engines_with_spare_containers(in_docker: CommandLine, tmp_path: Path) -> None:
    with own_daemon() as second:
        shared = "unix:///var/run/docker.sock"
        engines = ["--docker", f"{shared}=1", "--docker", f"{second.address}=1", "--warm", "1"]
        assert main(in_docker("-n", "4", "--concurrency", "2", *engines)) == 0
        assert [row["reward"] for row in results(tmp_path / "run")] == [1.0] * 4
        metrics = (tmp_path / "run" / "metrics.prom").read_text().splitlines()
        started = [line for line in metrics if "start_seconds_count" in line]
        assert sorted(line.split('"')[1] for line in started) == sorted([shared, second.address])
        assert sum(float(line.split()[-1]) for line in started) == 8  # for each rollout its own and the verifier's
        assert second.say("ps", "--all", "--quiet") == "" and containers_of(os.getpid()) == []


@pytest.mark.timeout(600)
def test_kill_9_in_mid_run_leaves_containers_that_the_next_start_removes(
    in_docker: CommandLine, proxy: RunningProxy, tmp_path: Path
) -> None:
    pool, name = open_pool(proxy.pool), tmp_path.name
    arguments = in_docker(
        "-n", "4", "--concurrency", "2", "--warm", "1", command=f"{AGENT}; setsid sleep 600 & sleep 1"
    )
    labels = [f"--label={label}={value}" for label, value in labels_of("sandbox", this_process(), "another").items()]
    other = said("run", "--detach", "--rm", "--network", "none", *labels, "bb:1", "sleep", "600")
    killed = start(arguments)
    try:
        wait_for(lambda: killed.poll() is not None or len(containers_of(killed.pid)) >= 2)
        killed.kill()
        killed.communicate()
        assert containers_of(killed.pid) != []
        assert main(arguments) == 0
        assert containers_of(killed.pid) == [] and len(containers_of(os.getpid())) == 1
        assert [row["reward"] for row in results(tmp_path / "run")] == [1.0] * 4
        assert set(failures(pool, name)) <= {None, "interrupted"}
    finally:
        killed.kill()
        pool.close()
        subprocess.run(["docker", "rm", "--force", other], capture_output=True, check=True)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["killed", "hangs"])
def test_a_daemon_that_is_away_in_mid_run_costs_no_rollout_its_verdict(
    in_docker: CommandLine, proxy: RunningProxy, tmp_path: Path, way: str
) -> None:
    pool, name = open_pool(proxy.pool), tmp_path.name
    with own_daemon() as daemon:
        running = start(
            in_docker("-n", "6", "--concurrency", "2", "--docker", daemon.address, command=f"{AGENT}; sleep 3")
        )
        try:
            wait_for(lambda: running.poll() is not None or len(daemon.say("ps", "--quiet").split()) >= 2)
            daemon.kill() if way == "killed" else daemon.hang()
            assert running.stdout is not None
            seen = next((line for line in running.stdout if "waiting: the Docker daemon" in line), "")
            assert f"the Docker daemon at {daemon.address} has been away for" in seen
            daemon.start() if way == "killed" else daemon.go_on()
            output, _ = running.communicate(timeout=600)
            assert running.returncode == 0, output
            assert [row["reward"] for row in results(tmp_path / "run")] == [1.0] * 6
            assert set(failures(pool, name)) <= {None, "outage"}
            assert ("outage" in failures(pool, name)) >= (way == "killed")
            assert daemon.say("ps", "--all", "--quiet") == ""
        finally:
            running.kill()
            pool.close()


@pytest.mark.long
def test_the_audit_log_says_which_places_a_sandbox_was_let_reach(
    command_line: CommandLine, in_docker: CommandLine, proxy: RunningProxy, capsys: pytest.CaptureFixture[str]
) -> None:
    named = TASK | {"network": "full", "reach": ["10.1.2.3", "192.168.0.0/16"]}
    shut = {"id": "shut", "verifier": {"command": "true", "network": "none"}}
    tasks = [TASK, named | {"id": "open"}, named | shut]
    assert main(command_line("--sandbox", "docker", "--image", "bb:1", tasks=tasks, command=AGENT)) == 0
    capsys.readouterr()
    assert proxy_main(["pool", "events", proxy.pool]) == 0
    notes = [line for line in capsys.readouterr().out.splitlines() if " egress " in line]
    ends = sorted(line.split(" of command, ")[1] for line in notes)
    assert ends == [f"{who}: the Internet, 10.1.2.3, 192.168.0.0/16" for who in ("agent", "agent", "verifier")]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--docker", "tcp://a=0"], "with both above 0, not: tcp://a=0; correct --docker"),
        (
            ["--docker", "tcp://a", "--sandbox", "process"],
            "--docker does not go with --sandbox process",
        ),
        (["--docker", "unix:///nowhere.sock"], "the Docker daemon at unix:///nowhere.sock does not answer"),
        (["--warm", "-1"], "warm"),
    ],
)
def test_engines_that_cannot_be_had_are_one_sentence(
    in_docker: CommandLine, capsys: pytest.CaptureFixture[str], more: list[str], sentence: str
) -> None:
    assert main(in_docker(*more)) == 2
    errors = capsys.readouterr().err
    assert sentence in errors and len(errors.splitlines()) == 1
