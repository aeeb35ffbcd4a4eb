"""Harbor tasks in real containers: the oracle solution reaches reward 1, and doing nothing does not."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from harness.tasks import Task
from harness.tasks.harbor import load_harbor
from harness.validation.runner import ValidationPlan, ValidationResults, prove
from harness.validation.trials import Kind, TrialSpec, run_trial
from sandboxes.docker.backend import DockerSandboxes, Options
from tests.harness.test_harbor import EXAMPLES, task_directory

QUICK = {"late-orders"}
ORACLE_AND_NOTHING: dict[Kind, float] = {"oracle": 1.0, "no-op": 0.0}


@pytest.fixture
async def sandboxes(docker_daemon: str) -> AsyncIterator[DockerSandboxes]:
    opened = await DockerSandboxes.open(Options(address=docker_daemon, image="deb:py", run="test"))
    yield opened
    await opened.close()


@pytest.mark.parametrize(
    "directory",
    [pytest.param(path, id=path.name, marks=[] if path.name in QUICK else pytest.mark.long) for path in EXAMPLES],
)
async def test_an_example_is_solved_by_its_oracle_and_not_by_nothing_nor_by_code_without_work(
    sandboxes: DockerSandboxes, tmp_path: Path, directory: Path
) -> None:
    plan = ValidationPlan(tasks=[load_harbor(directory)], repeat=1, concurrency=2)
    (finding,) = await prove(sandboxes, plan, ValidationResults(tmp_path))
    assert (finding.verdict, finding.where, finding.place) == ("accepted", "shared", "could be fresh"), finding.cause
    assert (finding.bought_by, finding.cause) == ([], "")


async def test_a_compose_file_brings_a_service_that_agent_and_tests_reach(
    sandboxes: DockerSandboxes, tmp_path: Path
) -> None:
    compose = {
        "environment__docker-compose_dot_yaml": """
services:
  main: {depends_on: {notes: {condition: service_healthy}}}
  notes:
    image: bb:1
    command: ["sh", "-c", "mkdir /www; echo $$WORDS > /www/index.html; exec httpd -f -p 8001 -h /www"]
    environment: {WORDS: from the service}
    healthcheck: {test: "wget -q -O - http://127.0.0.1:8001/", interval: 1s}
""",
        "environment__Dockerfile": "FROM bb:1\nWORKDIR /app\n",
        "solution__solve_dot_sh": "#!/bin/sh\nwget -q -O /app/note http://notes:8001/\n",
        "tests__test_dot_sh": """#!/bin/sh
[ "$(cat note)" = "$(wget -q -O - http://notes:8001/)" ] && echo 1 > /logs/verifier/reward.txt && exit
echo 0 > /logs/verifier/reward.txt
""",
    }
    task = load_harbor(task_directory(tmp_path / "task", "[environment]\nallow_internet = false", **compose))
    (finding,) = await prove(
        sandboxes, ValidationPlan(tasks=[task], repeat=1, concurrency=2), ValidationResults(tmp_path)
    )
    assert finding.verdict == "accepted", finding.cause


SEPARATE = """
artifacts = ["/app/result", {source = "/app/data", exclude = ["*.tmp"]}, "/app/gone"]
[verifier]
environment_mode = "separate"
collect = [{command = "echo 3 > /logs/artifacts/rows"}, {command = "exit 9"}]
[verifier.environment]
env = {WORDS = "of the verifier"}
network_mode = "no-network"
[environment]
env = {WORDS = "of the agent"}
"""
SEPARATE_FILES = {
    "environment__Dockerfile": "FROM deb:py\nWORKDIR /app\n",
    "tests__Dockerfile": "FROM bb:1\nWORKDIR /app\nCOPY test.sh /tests/\nRUN echo stale > /app/gone\n",
    "solution__solve_dot_sh": "mkdir data; touch data/a.tmp other; echo $WORDS > result; ln -s / data/root\n",
    "tests__test_dot_sh": """#!/bin/sh
cd /app
[ "$(cat result)" = "of the agent" ] && [ "$WORDS" = "of the verifier" ] && [ "$(cat /logs/artifacts/rows)" = 3 ] &&
    [ "$(ls)" = "$(printf 'data\nresult')" ] && [ -z "$(ls data)" ] && ! which python3 &&
    echo 1 > /logs/verifier/reward.txt && exit
echo 0 > /logs/verifier/reward.txt
""",
}


async def test_separate_tests_see_the_artifacts_and_nothing_else(sandboxes: DockerSandboxes, tmp_path: Path) -> None:
    """Their own image has no Python, and a file at /app/gone, which the agent did not leave."""
    task = load_harbor(task_directory(tmp_path, SEPARATE, **SEPARATE_FILES))
    for kind, reward in ORACLE_AND_NOTHING.items():
        trial = await run_trial(sandboxes, TrialSpec(task, "a", kind, 0))
        assert (trial.reward, trial.failure, trial.detail) == (reward, None, "")


OF_SERVICE = """
artifacts = ["/srv/calls", {source = "/srv/calls", service = "api"}, {source = "/srv/later", service = "api"}]
[verifier]
environment_mode = "separate"
collect = [
    {service = "api", command = "n=$(wc -l < calls); sleep 1; echo $(($(wc -l < calls) - n)) $PWD > later"},
    {command = "mkdir /srv; echo lies > /srv/calls; (while wget -q -O - $CALL/late; do :; done) >/dev/null 2>&1 & \
wget -q -O - $CALL/late"},
    {command = "sleep 100", service = "api", timeout_sec = 1},
]
[environment]
env = {CALL = "api:8001/cgi-bin/call"}
allow_internet = false
"""
OF_SERVICE_FILES = {
    "environment__Dockerfile": "FROM bb:1\nWORKDIR /app\n",
    "environment__docker-compose_dot_yaml": """
services:
  main: {depends_on: {api: {condition: service_healthy}}}
  api: {build: ./api, healthcheck: {test: "test -e calls", interval: 1s}}
""",
    "environment__api__Dockerfile": """FROM bb:1
WORKDIR /srv
COPY call /srv/cgi-bin/call
RUN chmod 755 /srv/cgi-bin/call
CMD touch calls; exec httpd -f -p 8001 -h /srv
""",
    "environment__api__call": "#!/bin/sh\necho $PATH_INFO >> /srv/calls\nprintf 'Status: 200\\n\\nok\\n'\n",
    "solution__solve_dot_sh": "#!/bin/sh\nfor call in 1 2 3; do wget -q -O - $CALL/$call || exit 1; done\n",
    "tests__test_dot_sh": """#!/bin/sh
cd /srv
[ "$(head -3 calls | tr '\\n' ' ')" = "/1 /2 /3 " ] && [ "$(tail -1 calls)" = /late ] &&
    [ "$(cat later)" = "0 /srv" ] && echo 1 > /logs/verifier/reward.txt && exit
echo 0 > /logs/verifier/reward.txt
""",
}


async def test_separate_tests_see_what_a_service_left_when_no_agent_could_reach_it(
    sandboxes: DockerSandboxes, tmp_path: Path
) -> None:
    """The service notes calls. The agent leaves a file of its own in that place, and a process that calls on."""
    task = load_harbor(task_directory(tmp_path, OF_SERVICE, **OF_SERVICE_FILES))
    for kind, reward in ORACLE_AND_NOTHING.items():
        trial = await run_trial(sandboxes, TrialSpec(task, "a", kind, 0))
        assert (trial.reward, trial.failure, trial.detail) == (reward, None, "")


async def test_tests_get_a_network_that_the_agent_did_not_have(sandboxes: DockerSandboxes) -> None:
    verifier = {"command": 'test "$(cat seen)" = lo && test -e /sys/class/net/eth0', "network": "full", "user": "root"}
    fields = {"id": "a", "instruction": "?", "profile": "harbor", "work": "/srv", "network": "none"}
    solution = {"command": "ls /sys/class/net > seen"}
    task = msgspec.convert(fields | {"verifier": verifier, "solution": solution}, Task)
    trial = await run_trial(sandboxes, TrialSpec(task, "a", "oracle", 0))
    assert (trial.reward, trial.failure, trial.detail) == (1.0, None, "")
