"""Environments that vary: what is chosen, what is applied, what is recorded, and that tasks stay solvable."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from sqlalchemy import select

from harness.cli import main
from harness.environment.augment import KINDS, apply, chosen, every, of_run
from harness.environment.varied import check_unseen
from harness.failure import AttemptFailed
from harness.setup.stack import RunningProxy
from harness.tasks import Task
from harness.tasks.verdict_options import Augment
from proxy.pool.database import open_pool
from proxy.pool.errors import UserError
from proxy.pool.schema import attempts
from sandboxes.base import Limits, Result, Spec
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.local.process import ProcessSandbox
from tests.harness.conftest import HELLO, SHELL_AGENT, write_tasks

PLAIN = ["--sandbox", "process"]
MANY = Augment(
    versions={"a": ["1", "2"], "b": ["1"]},
    remove=["c"],
    mirror=True,
    shell=["/bin/sh"],
    locale=["C", "POSIX"],
    timezone=["UTC0", "JST-9"],
    user=["dev"],
    commands={"touch": "touch varied", "skip": "exit 3"},
)


def test_the_choice_is_a_pure_function_of_seed_task_and_attempt() -> None:
    def names(seed: int, task: str, attempt: str) -> list[str]:
        return [variation.name for variation in chosen(MANY, seed, task, attempt)]

    assert names(1, "t", "0/0") == names(1, "t", "0/0")
    others = {tuple(names(*of)) for of in ((1, "t", "0/0"), (2, "t", "0/0"), (1, "u", "0/0"), (1, "t", "0/1"))}
    assert len(others) > 1
    counts = Counter(name for attempt in range(1000) for name in names(0, "t", str(attempt)))
    assert {name.partition("=")[0] for name in counts} >= {"version", "removed", "mirror", "shell", "locale", "command"}
    assert 420 < counts["mirror=dead"] < 580 and 170 < counts["locale=C"] < 330
    assert counts["version=a==1"] + counts["version=a==2"] < 580  # at most one version of a package


def test_one_more_variation_shifts_no_other() -> None:
    more = msgspec.structs.replace(MANY, commands=MANY.commands | {"last": "true"})
    for attempt in map(str, range(50)):
        before, after = chosen(MANY, 0, "t", attempt), chosen(more, 0, "t", attempt)
        assert [v for v in after if v.value != "last"] == before


async def test_what_is_applied_and_what_is_passed_over(sandbox: ProcessSandbox) -> None:
    task = msgspec.convert(HELLO, Task)
    selected = [v for v in every(MANY) if not v.needs_own_root]
    selected += list(every(Augment(shell=["/no/shell"])))
    applied, env = await apply(sandbox, task, selected)
    assert "command=touch" in applied and "command=skip" not in applied and "shell=/no/shell" not in applied
    assert env["SHELL"] == "/bin/sh" and env["USER"] == env["LOGNAME"] == "dev" and env["TZ"] == "JST-9"
    assert "varied" in (await sandbox.run("ls", Limits(), {})).output


class Recorder(ProcessSandbox):
    """A process sandbox that notes each command and runs none, so that no command can do harm."""

    commands: list[str]

    async def run(self, command: str, *_: Any) -> Result:
        self.commands.append(command)
        return Result("exit", 0, "", 0, 0.0)


async def test_what_would_change_the_machine_is_never_run_in_a_process_sandbox(tmp_path: Path) -> None:
    recorder = Recorder("1-1-a", tmp_path, lambda _: None, None)
    recorder.commands = []
    harmful = [v for v in every(replace(MANY, remove=["c", "/opt/c"])) if v.kind in ("version", "removed", "mirror")]
    assert len(harmful) == 6
    assert await apply(recorder, msgspec.convert(HELLO, Task), harmful) == ([], {})
    assert recorder.commands == []


async def test_a_dead_mirror_is_configured_in_a_container(docker_daemon: str) -> None:
    sandboxes = await DockerSandboxes.open(Options(address=docker_daemon, image="deb:py", run="test"))
    sandbox = await sandboxes.start(Spec(profile="harbor", network="none", memory_mb=256))
    try:
        await sandbox.write("/etc/apt/sources.list", "deb https://deb.debian.org/debian bookworm main\n")
        applied, _ = await apply(sandbox, msgspec.convert(HELLO, Task), list(every(Augment(mirror=True))))
        shown = await sandbox.run("cat ~/.npmrc ~/.config/pip/pip.conf /etc/apt/sources.list", Limits(), {})
    finally:
        await sandbox.stop()
        await sandboxes.close()
    assert applied == ["mirror=dead"]
    assert "registry=http://127.0.0.1:9/\n" in shown.output
    assert "index-url = http://127.0.0.1:9/simple\n" in shown.output
    assert "deb http://127.0.0.1:9/debian bookworm main\n" in shown.output


async def test_a_variation_that_fails_is_the_environments_failure(sandbox: ProcessSandbox) -> None:
    task = msgspec.convert(HELLO, Task)
    with pytest.raises(AttemptFailed) as failed:
        await apply(sandbox, task, list(every(Augment(commands={"bad": "echo no; exit 4"}))))
    assert (failed.value.kind, failed.value.detail) == (
        "sandbox_start",
        "the variation command=bad ended by exit code 4: no",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_the_command_line_varies_something(kind: str) -> None:
    assert {variation.kind for variation in every(of_run([kind]))} == {kind}


Run = Callable[..., list[dict[str, Any]]]


def test_what_was_applied_stands_in_the_attempts_row(run: Run, proxy: RunningProxy) -> None:
    augment = {"probability": 1, "timezone": ["JST-9"], "commands": {"touch": "touch varied", "skip": "exit 3"}}
    agent = f'test "$TZ" = JST-9 && test -e varied && {SHELL_AGENT}'
    check = 'test -z "$TZ" && test ! -e varied && test "$(cat hello.txt)" = hello'
    verifier = {"command": check, "where": "fresh"}  # the verifier's environment is as ever
    (row,) = run(tasks=[HELLO | {"augment": augment, "verifier": verifier}], command=agent)
    assert (row["reward"], row["failure"]) == (1.0, None)
    with open_pool(proxy.pool).read() as connection:
        newest = select(attempts.c.augmentation).order_by(attempts.c.id.desc()).limit(1)
        assert connection.scalar(newest) == ["timezone=JST-9", "command=touch"]


def test_no_verifier_of_a_step_sees_a_variation(run: Run) -> None:
    """It is applied once, and the sandbox of the first step is that of the second."""
    verifier = {"command": 'test ! -e varied && test "$(cat hello.txt)" = hello', "where": "fresh"}
    steps = [{"name": name, "instruction": HELLO["instruction"], "verifier": verifier} for name in ("a", "b")]
    task = {"id": "steps", "steps": steps, "augment": {"probability": 1, "commands": {"touch": "touch varied"}}}
    (row,) = run(tasks=[task], command=f"test -e varied && {SHELL_AGENT}")
    assert (row["reward"], row["failure"]) == (1.0, None), row


TRUE: dict[str, Any] = {"command": "true"}
SHARED: dict[str, Any] = {"where": "shared"}
OWN: dict[str, Any] = {"environment": {}}
TWO_STEPS = [
    {"name": "a", "instruction": "i", "verifier": TRUE},
    {"name": "b", "instruction": "i", "verifier": TRUE | SHARED},
]


@pytest.mark.parametrize(
    ("kind", "augment", "verifier", "more"),
    [
        ("docker", {"versions": {"a": ["1"]}}, SHARED, {}),
        ("docker", {"remove": ["/opt/a"]}, {}, {"daemons": True}),
        ("docker", {"mirror": True}, SHARED, {}),
        ("docker", {"commands": {"a": "true"}}, {}, {"steps": TWO_STEPS}),
        ("docker", {"commands": {"a": "true"}}, OWN, {}),
        ("docker", {"remove": ["/opt/a"]}, OWN, {}),
        ("process", {"commands": {"a": "true"}}, {}, {}),
    ],
)
def test_variations_that_a_verifier_would_see_are_refused(
    kind: str, augment: dict[str, Any], verifier: dict[str, Any], more: dict[str, Any]
) -> None:
    task = msgspec.convert(HELLO | more | {"verifier": TRUE | verifier, "augment": augment}, Task)
    why = "travel to the verifier's own environment" if verifier == OWN else "the verifier would see it"
    with pytest.raises(UserError, match=rf"the variation '{next(iter(augment))}' .* task 'hello' .*{why}"):
        check_unseen([task], None, kind)
    with pytest.raises(UserError, match=why):
        check_unseen([replace(task, augment=None)], task.augment, kind)
    check_unseen([replace(task, augment=Augment(locale=["C"]))], task.augment, kind)  # its own variations alone count


@pytest.mark.parametrize(
    ("kind", "augment", "verifier"),
    [
        ("docker", MANY, {}),
        ("docker", Augment(versions={"a": ["1"]}, mirror=True), OWN),
        ("process", MANY, {"where": "fresh"}),
        ("process", replace(MANY, commands={}), {}),  # what changes the machine is skipped there
    ],
)
def test_variations_that_no_verifier_would_see_are_taken(kind: str, augment: Augment, verifier: dict[str, Any]) -> None:
    task = msgspec.convert(HELLO | {"verifier": TRUE | verifier}, Task)
    check_unseen([task], augment, kind)


def test_a_run_whose_verifier_would_see_a_variation_does_not_begin(
    command_line: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command_line(tasks=[HELLO | {"augment": {"commands": {"touch": "touch varied"}}}])) == 2
    assert "the variation 'commands' changes the sandbox in which task 'hello' is judged" in capsys.readouterr().err


def test_a_run_varies_tasks_that_do_not_say(run: Run, proxy: RunningProxy, command_line: Any) -> None:
    rows = run("--augment", "user", "-n", "6", command=f'echo "$USER" >> who; {SHELL_AGENT}')
    assert [row["reward"] for row in rows] == [1.0] * 6
    with open_pool(proxy.pool).read() as connection:
        newest = select(attempts.c.augmentation).order_by(attempts.c.id.desc()).limit(6)
        given = connection.scalars(newest).all()
    assert [] in given and any(names and names[0].startswith("user=") for names in given)
    assert main(command_line("--augment", "locale", "-n", "6", command=f'echo "$USER" >> who; {SHELL_AGENT}')) == 2


def test_validate_names_the_variation_that_the_oracle_does_not_survive(tmp_path: Path) -> None:
    solved = HELLO | {"solution": {"command": "test ! -e varied && echo hello > hello.txt"}}
    tasks = [
        solved | {"id": "fragile", "augment": {"commands": {"fine": "true", "touch": "touch varied"}}},
        solved | {"id": "robust", "augment": {"commands": {"fine": "true"}}},
        solved | {"id": "impossible", "augment": {"commands": {"bad": "exit 1"}}},
        solved | {"id": "none"},
    ]
    file = write_tasks(tmp_path / "tasks.jsonl", *tasks)
    assert (
        main(["validate", str(file), "--out", str(tmp_path / "out"), "--augment", "--kinds", "timezone", *PLAIN]) == 0
    )
    lines = map(json.loads, (tmp_path / "out/report.jsonl").read_text().splitlines())
    verdicts = {line["id"]: (line["verdict"], line["cause"]) for line in lines}
    assert verdicts["fragile"][0] == "oracle fails"
    assert verdicts["fragile"][1].startswith("with command=touch, its reward is 0 (the solution ended by exit code 1")
    assert verdicts["impossible"][0] == "environment broken" and "with command=bad" in verdicts["impossible"][1]
    assert verdicts["robust"] == verdicts["none"] == ("accepted", "")
    trials = list(map(json.loads, (tmp_path / "out/trials.jsonl").read_text().splitlines()))
    tried = [trial["variation"] for trial in trials if trial["task"].startswith("none") and trial["variation"]]
    assert len(tried) == len(of_run(["timezone"]).timezone)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--augment", "weather"], "augment[0] = 'weather' is unknown; choose from"),
        (["--augment", "shell,"], "augment[1] = '' is unknown; choose from"),
    ],
)
def test_an_unknown_kind_ends_the_start(
    command_line: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    assert main(command_line(*options)) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["validate", str(tmp_path / "tasks.jsonl"), "--augment", "--kinds", options[1], *PLAIN])
    assert "is no kind of variation; choose from: shell, locale" in capsys.readouterr().err
