"""Loads Harbor task directories (and those of Terminal-Bench 2) unchanged; each becomes a task of profile `harbor`.

A directory holds `task.toml`, `instruction.md`, `environment/Dockerfile`, `tests/test.sh` and `solution/solve.sh`, or
the same under `steps/NAME`. Keys of `task.toml` that change nothing here go into the task's metadata; those in
harness/tasks/harbor_toml.py are refused by name. Two rules are stricter than Harbor's: a task that says nothing about
the network gets it for its tests only, and nothing is read from this machine's environment.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import dropwhile
from pathlib import Path
from typing import Any

import msgspec

from harness.tasks.check import check
from harness.tasks.compose import read_compose
from harness.tasks.directories import check_directory, check_dockerfiles, digest_of
from harness.tasks.harbor_toml import (
    HarborEnvironment,
    HarborFile,
    HarborStep,
    Refused,
    environments_of,
    refuse,
    resolved,
    unknown,
)
from harness.tasks.harbor_verifier import LOGS, limits_of, patience, until_healthy, verifier_of
from harness.tasks.schema import McpServer, Solution, Step, Task, TaskImage, Verifier, built_images
from proxy.pool.errors import UserError
from proxy.pool.input_files import check_content, read_text
from proxy.pool.settings_file import checked, read_table

SCRIPT_ENV = {"DEBIAN_FRONTEND": "noninteractive"}


def is_task(directory: Path) -> bool:
    """Whether a directory is one task, and not a directory of tasks."""
    return (directory / "task.toml").is_file() or (directory / "task.yaml").is_file()


def load_harbor(directory: Path) -> Task:
    """Load the task of a directory. Refused when it needs what is not offered, UserError when it is malformed."""
    directory = directory.resolve()
    if not (directory / "task.toml").is_file():
        refuse(directory, "task.yaml", "is of Terminal-Bench 1; convert the task to the Harbor format")
    where = str(directory / "task.toml")
    with _left_out():
        check_directory(directory)  # before anything in it is read: a link could lead to any file of this machine
        digest = digest_of([directory])
    table = read_table(directory / "task.toml")
    file = checked(table, HarborFile, where, strict=False)
    resolved(file, directory)
    environment, agent = file.environment, file.agent
    compose = read_compose(directory)
    task = Task(
        id=str(file.task.get("name") or directory.name),
        instruction="" if file.steps else _instruction(directory),
        verifier=Verifier() if file.steps else verifier_of(directory, directory, file.verifier, file, None),
        steps=tuple(_step(directory, step, file) for step in file.steps),
        steps_reward=file.multi_step_reward_strategy or "mean",
        image=compose.image or _image(directory, environment),
        services=compose.services,
        mcp=tuple(
            McpServer(
                name=server.name,
                command=(server.command, *server.args) if server.transport == "stdio" and server.command else (),
                url=server.url if server.transport != "stdio" else "",
            )
            for server in environment.mcp_servers
        ),
        profile="harbor",
        network="full" if (agent.network_mode or environment.network_mode) == "public" else "model",
        work=environment.workdir or "",
        setup="\n".join([LOGS, *until_healthy(environment.healthcheck)]),
        setup_timeout=max(patience(one.healthcheck) for one in environments_of(file)),
        daemons=True,
        timeout=agent.timeout_sec or 600,
        limits=limits_of(environment),
        env=compose.env | environment.env,
        solution=_solution(directory, file),
        metadata=_metadata(table, file),
        digest=digest,
    )
    content = msgspec.to_builtins(task)
    check_content(content, where)  # again: texts have become numbers, and numbers have been added up
    task = check(checked(content, Task, where), where)
    with _left_out():
        check_dockerfiles(built_images(task))
    return task


@contextmanager
def _left_out() -> Iterator[None]:
    """Leave out only this task for what its directory holds."""
    try:
        yield
    except UserError as error:
        raise Refused(str(error)) from error


def _instruction(directory: Path) -> str:
    """Read the instruction without the canary lines at its head, which mark benchmark data."""
    lines = read_text(directory / "instruction.md").split("\n")
    return "\n".join(dropwhile(_is_canary, lines)).lstrip("\n")


def _is_canary(line: str) -> bool:
    line = line.strip().lower()
    return "canary" in line and (line.startswith("#") or (line.startswith("<!--") and line.endswith("-->")))


def _step(root: Path, table: HarborStep, file: HarborFile) -> Step:
    directory = root / "steps" / table.name
    judge = msgspec.structs.replace(
        table.verifier,
        timeout_sec=table.verifier.timeout_sec or file.verifier.timeout_sec,
        env=file.verifier.env | table.verifier.env,
        network_mode=table.verifier.network_mode or file.verifier.network_mode,
    )
    workdir = directory / "workdir"
    verifier = verifier_of(root, directory, judge, file, table)
    if (
        verifier.where == "shared"
        and table is not file.steps[-1]
        and not (judge.network_mode or file.environment.network_mode)
    ):
        verifier = msgspec.structs.replace(verifier, network=None)  # the next step's agent would keep the network
    own_setup = ["bash ./setup.sh || exit"] if (workdir / "setup.sh").is_file() else []
    return Step(
        name=table.name,
        instruction=_instruction(directory),
        verifier=verifier,
        directories={".": str(workdir)} if workdir.is_dir() else {},
        setup="\n".join([*own_setup, *until_healthy(table.healthcheck)]),
        timeout=table.agent.timeout_sec,
        min_reward=table.min_reward,
        solution=_solution(directory, file),
    )


def _solution(directory: Path, file: HarborFile) -> Solution | None:
    if not (directory / "solution/solve.sh").is_file():
        return None
    return Solution(
        command="chmod +x /solution/solve.sh && exec /solution/solve.sh",
        directories={"/solution": str(directory / "solution")},
        env=SCRIPT_ENV | file.solution.env,
    )


def _image(directory: Path, environment: HarborEnvironment) -> TaskImage:
    if environment.docker_image:
        return TaskImage(name=environment.docker_image)
    if not (directory / "environment/Dockerfile").is_file():
        raise UserError(f"{directory} has neither environment/Dockerfile nor docker_image; write one of them")
    return TaskImage(directory=str(directory / "environment"))


def _metadata(table: dict[str, Any], file: HarborFile) -> dict[str, Any]:
    """The keys of a task that change nothing here."""
    carried: dict[str, Any] = {"task": file.task, "unknown": unknown(table)}
    carried["build_timeout_sec"] = file.environment.build_timeout_sec
    return {**file.metadata, "harbor": {name: value for name, value in carried.items() if value}}
