"""Harbor task directories: what they become, and what is refused or malformed."""

from pathlib import Path

import msgspec
import pytest

from harness.tasks import parts_of
from harness.tasks.harbor import is_task, load_harbor
from harness.tasks.harbor_toml import Refused
from harness.tasks.schema import Task, TaskImage
from proxy.pool.errors import UserError
from tests.harness.conftest import ROOT

EXAMPLES = sorted((ROOT / "examples/tasks/harbor").iterdir())


def task_directory(path: Path, toml: str = "", **files: str) -> Path:
    """A small task; `files` replace its own, with __ for / and _dot_ for a point."""
    whole = {
        "task.toml": toml,
        "instruction.md": "Do it.",
        "environment/Dockerfile": "FROM bb:1",
        "tests/test.sh": "#!/bin/sh\n",
    }
    whole |= {name.replace("__", "/").replace("_dot_", "."): text for name, text in files.items()}
    for name, text in whole.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    return path


@pytest.mark.parametrize("directory", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_loaded_and_has_an_oracle(directory: Path) -> None:
    task = load_harbor(directory)
    assert is_task(directory) and task.profile == "harbor" and task.network == "model"
    assert all(part.task.solution and part.task.verifier.network is None for part in parts_of(task))
    assert msgspec.convert(msgspec.to_builtins(task), Task) == task


def test_a_directory_says_what_a_json_line_says(tmp_path: Path) -> None:
    toml = """
        version = "1.0"
        novel = 1
        [metadata]
        difficulty = "easy"
        [agent]
        timeout_sec = 90.5
        [verifier]
        timeout_sec = 30
        env = { LEVEL = "${LEVEL:-3}" }
        [environment]
        memory = "2G"
        storage = "512M"
        cpus = 2
        workdir = "/srv"
        env = { A = "b" }
        allow_internet = true
        [environment.later]
        x = 1
    """
    directory = task_directory(tmp_path, toml, instruction_dot_md="<!-- canary 123 -->\n\nDo it.")
    task = load_harbor(directory)
    assert (task.id, task.instruction, task.timeout, task.work) == (tmp_path.name, "Do it.", 90.5, "/srv")
    assert (task.limits.memory_mb, task.limits.disk_mb, task.limits.cpus) == (2048, 512, 2)
    assert (task.network, task.verifier.network, task.env) == ("full", "full", {"A": "b"})
    assert (task.verifier.timeout, task.verifier.env, task.solution) == (30, {"LEVEL": "3"}, None)
    assert task.image == TaskImage(directory=str(directory / "environment"))
    assert task.metadata["difficulty"] == "easy"
    assert task.metadata["harbor"]["unknown"] == {"novel": 1, "environment.later": {"x": 1}}


@pytest.mark.parametrize(
    "toml, agent, verifier",
    [
        ("", "model", "full"),
        ("[environment]\nallow_internet = false", "model", None),
        ('[environment]\nnetwork_mode = "public"', "full", "full"),
        ('[environment]\nnetwork_mode = "public"\n[agent]\nnetwork_mode = "no-network"', "model", "full"),
        ('[environment]\nallow_internet = true\n[verifier]\nnetwork_mode = "no-network"', "full", None),
    ],
)
def test_the_agent_gets_the_network_only_where_the_task_says_so(
    tmp_path: Path, toml: str, agent: str, verifier: str | None
) -> None:
    task = load_harbor(task_directory(tmp_path, toml))
    assert (task.network, task.verifier.network) == (agent, verifier)


def test_of_the_steps_only_the_last_ones_tests_get_a_network_that_stays(tmp_path: Path) -> None:
    files = {f"steps__{name}__instruction_dot_md": "Do." for name in ("one", "two")}
    steps = '[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n'
    task = load_harbor(task_directory(tmp_path / "a", steps, **files))
    assert [step.verifier.network for step in task.steps] == [None, "full"]
    with pytest.raises(UserError, match=r"steps\[0\].verifier.network: 'full' would stay for the next step's agent"):
        load_harbor(task_directory(tmp_path / "b", f'{steps}[verifier]\nnetwork_mode = "public"', **files))


def test_steps_share_tests_and_bring_their_own(tmp_path: Path) -> None:
    toml = """
        multi_step_reward_strategy = "final"
        [verifier]
        timeout_sec = 40
        env = { A = "1" }
        [[steps]]
        name = "one"
        min_reward = { reward = 1.0 }
        [[steps]]
        name = "two"
        [steps.verifier]
        env = { A = "2" }
        [steps.healthcheck]
        command = "true"
    """
    files = {"steps__one__instruction_dot_md": "First.", "steps__two__instruction_dot_md": "Second."}
    files |= {"steps__two__tests__test_dot_sh": "#!/bin/sh\n", "steps__two__workdir__setup_dot_sh": "true\n"}
    task = load_harbor(task_directory(tmp_path, toml, **files))
    one, two = task.steps
    assert (task.steps_reward, one.min_reward, one.instruction, two.instruction) == (
        "final",
        {"reward": 1.0},
        "First.",
        "Second.",
    )
    assert list(one.verifier.directories.values()) == [str(tmp_path / "tests")]
    assert list(two.verifier.directories.values()) == [str(tmp_path / "tests"), str(tmp_path / "steps/two/tests")]
    assert (one.verifier.env, two.verifier.env, two.verifier.timeout) == ({"A": "1"}, {"A": "2"}, 40)
    assert two.directories == {".": str(tmp_path / "steps/two/workdir")} and "setup.sh" in two.setup
    assert "until timeout" in two.setup


@pytest.mark.parametrize(
    "toml, sentence",
    [
        ("[environment]\ngpus = 1", "environment.gpus is not offered"),
        ('[environment]\nos = "windows"', "environment.os = 'windows' is not offered"),
        ('[environment]\nskills_dir = "/s"', "environment.skills_dir is not offered"),
        (
            '[[environment.mcp_servers]]\nname = "m"\nurl = "http://m"',
            "environment.mcp_servers.m.transport = 'sse' is not offered",
        ),
        ('[environment]\nnetwork_mode = "allowlist"', "environment.network_mode = 'allowlist' is not offered"),
        ('[agent]\nnetwork_mode = "allowlist"', "agent.network_mode = 'allowlist' is not offered"),
        ('[agent]\nuser = "nobody"', "agent.user = 'nobody' is not offered"),
        ('[[verifier.collect]]\ncommand = "x"\nuser = "me"', "verifier.collect.user = 'me' is not offered"),
        (
            '[[verifier.collect]]\ncommand = "x"\nservice = "db"\nuser = "root"',
            "verifier.collect.user = 'root' is not offered: in a service",
        ),
        ("[verifier.environment]\ngpus = 1", "verifier.environment.gpus is not offered"),
        ('[[steps]]\nname = "a"\n[steps.agent]\nnetwork_mode = "public"', "steps.a.agent.network_mode is not offered"),
        ('[environment.env]\nA = "${SECRET}"', "env.A = '${SECRET}' is not offered"),
    ],
)
def test_what_is_not_offered_refuses_this_task_by_the_key(tmp_path: Path, toml: str, sentence: str) -> None:
    with pytest.raises(Refused) as raised:
        load_harbor(task_directory(tmp_path, toml))
    assert str(raised.value).startswith(f"{tmp_path}: {sentence}")


def test_mcp_servers_become_those_of_the_task(tmp_path: Path) -> None:
    program = 'name = "p"\ntransport = "stdio"\ncommand = "python3"\nargs = ["/s.py"]'
    address = 'name = "a-b"\ntransport = "streamable-http"\nurl = "http://m:8000/mcp"'
    tables = "\n".join(f"[[environment.mcp_servers]]\n{table}" for table in (program, address))
    found = load_harbor(task_directory(tmp_path, tables)).mcp
    assert [(server.name, server.command, server.url) for server in found] == [
        ("p", ("python3", "/s.py"), ""),
        ("a-b", (), "http://m:8000/mcp"),
    ]
    for table in (program.replace("stdio", "streamable-http"), address.replace("streamable-http", "stdio")):
        with pytest.raises(UserError, match="mcp"):  # what the transport needs is missing
            load_harbor(task_directory(tmp_path, f"[[environment.mcp_servers]]\n{table}"))


def test_files_that_are_not_offered_refuse_the_task_too(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="trajectory.json is not offered"):
        load_harbor(task_directory(tmp_path / "a", trajectory_dot_json=""))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/task.yaml").touch()
    with pytest.raises(Refused, match="task.yaml is of Terminal-Bench 1"):
        load_harbor(tmp_path / "b")


OF_DB = 'artifacts = [{source = "/d", service = "db"}]\n[verifier]\nenvironment_mode = "separate"'


@pytest.mark.parametrize(
    "toml, sentence",
    [
        ("version", "is not valid TOML"),
        ("[agent]\ntimeout_sec = -1", "agent.timeout_sec = -1: expected `float` > 0"),
        ('[environment]\nmemory = "much"', "environment.memory: 'much' is no size"),
        ("[[steps]]\nname = '../x'", "steps[0].name = '../x': "),
        ('[[steps]]\nname = "x\\n"', "steps[0].name = 'x\\n': "),
        ("[[steps]]\nname = 'x'", "steps/x/instruction.md cannot be read"),
        (OF_DB, "verifier.artifacts[1].path: 'db' is no service of the task; it has none"),
        (OF_DB.replace("/d", "d"), "artifacts: 'd' of the service 'db' is no absolute path"),
        (OF_DB.replace('"db"', '"../db"'), "artifacts[0].service"),
        (OF_DB.replace('"db"', '"db\\n"'), "artifacts[0].service"),
        ('[[verifier.collect]]\ncommand = "x"\nservice = "db"', "verifier.collect[0].service: 'db' is no service"),
    ],
)
def test_a_malformed_directory_is_told_with_file_and_key(tmp_path: Path, toml: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        load_harbor(task_directory(tmp_path, toml))
    assert sentence in str(raised.value) and not isinstance(raised.value, Refused)


SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
STEPS = '[[steps]]\nname = "one"\nartifacts = ["/step"]\n[[steps]]\nname = "two"\n[steps.verifier]\n'
OF_STEPS = {f"steps__{name}__instruction_dot_md": "Do." for name in ("one", "two")}


@pytest.mark.parametrize(
    "toml, where",
    [
        ("", "shared"),
        ('[verifier]\nenvironment_mode = "shared"', "shared"),
        (SEPARATE, "fresh"),
        ('[verifier.environment]\ndocker_image = "bb:1"', "fresh"),
    ],
)
def test_a_verifier_is_separate_where_the_task_says_so(tmp_path: Path, toml: str, where: str) -> None:
    verifier = load_harbor(task_directory(tmp_path, toml)).verifier
    assert (verifier.where, [one.path for one in verifier.artifacts]) == (
        where,
        ["/logs/artifacts"] if where == "fresh" else [],
    )


@pytest.mark.parametrize(
    "step, places",
    [
        ('environment_mode = "shared"', ["fresh", "shared"]),
        ("timeout_sec = 3", ["fresh", "fresh"]),
    ],
)
def test_a_step_may_differ_from_its_task(tmp_path: Path, step: str, places: list[str]) -> None:
    task = load_harbor(task_directory(tmp_path, f'artifacts = ["/all"]\n{SEPARATE}{STEPS}{step}', **OF_STEPS))
    assert [step.verifier.where for step in task.steps] == places
    assert [one.path for one in task.steps[0].verifier.artifacts] == ["/logs/artifacts", "/all", "/step"]


def test_separate_tests_bring_their_image_their_artifacts_and_their_environment(tmp_path: Path) -> None:
    toml = f"""
        artifacts = ["/app/result", {{source = "/logs/artifacts", exclude = ["*.tmp"]}}]
        {SEPARATE}
        env = {{ A = "1" }}
        collect = [{{command = "dump", timeout_sec = 5}}]
        [verifier.environment]
        memory = "1G"
        workdir = "/judge"
        env = {{ B = "2" }}
        network_mode = "no-network"
        [environment]
        env = {{ C = "3" }}
    """
    verifier = load_harbor(task_directory(tmp_path, toml, tests__Dockerfile="FROM bb:1")).verifier
    own = verifier.environment
    assert own is not None and own.image == TaskImage(directory=str(tmp_path / "tests"))
    assert (own.limits.memory_mb, own.work, own.env, verifier.env) == (1024, "/judge", {"B": "2"}, {"A": "1"})
    assert (verifier.directories, verifier.network) == ({}, None)
    assert [(one.path, one.exclude) for one in verifier.artifacts] == [
        ("/app/result", []),
        ("/logs/artifacts", ["*.tmp"]),
    ]
    assert [(one.command, one.timeout) for one in verifier.collect] == [("dump", 5)]


def test_what_a_service_leaves_and_what_runs_in_it_keep_their_service(tmp_path: Path) -> None:
    toml = f"""
        artifacts = [
            {{source = "/var/log/calls", service = "api", exclude = ["*.tmp"]}},
            {{source = "/a", service = "main"}},
        ]
        {SEPARATE}
        collect = [{{command = "dump", service = "api"}}, {{command = "diff", service = "main"}}]
    """
    compose = {"environment__docker-compose_dot_yaml": "services: {main: {}, api: {image: 'bb:1'}}"}
    verifier = load_harbor(task_directory(tmp_path, toml, **compose)).verifier
    assert [(one.service, one.place, one.exclude) for one in verifier.artifacts] == [
        ("", "/logs/artifacts", []),
        ("api", "/var/log/calls", ["*.tmp"]),
        ("", "/a", []),
    ]
    assert [(one.command, one.service) for one in verifier.collect] == [("dump", "api"), ("diff", "")]


def test_set_up_waits_for_the_slowest_health_check(tmp_path: Path) -> None:
    slow = f"{SEPARATE}[verifier.environment.healthcheck]\ncommand = 'true'\nstart_period_sec = 500"
    assert load_harbor(task_directory(tmp_path, slow)).setup_timeout > 600


def test_programs_under_test_are_kept_apart_alike_in_every_example() -> None:
    texts = [path.read_text() for path in (ROOT / "examples/tasks/harbor").glob("*/tests/apart.py")]
    assert len(texts) == 3 and len(set(texts)) == 1


def test_what_contradicts_itself_or_needs_services_beside_the_tests_is_told(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="tests/docker-compose.yaml is not offered"):
        load_harbor(task_directory(tmp_path / "a", SEPARATE, **{"tests__docker-compose_dot_yaml": ""}))
    both = '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]\ncpus = 1'
    with pytest.raises(UserError, match="a shared verifier has no environment of its own"):
        load_harbor(task_directory(tmp_path / "b", both))


@pytest.mark.parametrize("missing", ["instruction.md", "environment/Dockerfile", "tests/test.sh"])
def test_a_directory_without_a_part_is_malformed(tmp_path: Path, missing: str) -> None:
    (task_directory(tmp_path) / missing).unlink()
    with pytest.raises(UserError, match=missing.rpartition("/")[2]):
        load_harbor(tmp_path)
