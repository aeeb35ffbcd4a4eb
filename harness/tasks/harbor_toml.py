"""The tables of Harbor's task.toml (schema versions 1.0 to 1.4), and the keys that are refused here.

Keys are refused when ignoring them would change the task: GPUs, TPUs, other systems, MCP servers over SSE, skills,
lists of allowed hosts, other users than root (and in services, than the image's), a network that differs between steps,
variables of this machine, and prior trajectories.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import msgspec

from harness.tasks.schema import LONGEST_SECONDS, MAX_STEPS, SERVICE_NAME, Count, Seconds, Share, Text
from proxy.pool.errors import UserError
from proxy.pool.input_files import shortened

Mode = Literal["no-network", "public", "allowlist"]
MAIN = "main"
"""Harbor's name for the container of the agent; the others are services."""
UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}
Name = Annotated[str, msgspec.Meta(pattern=rf"^{SERVICE_NAME}\Z")]
STEP_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z"
TEMPLATE = re.compile(r"\$\{(\w{1,200})(?::-([^}]{0,10000}))?\}")
"""Bounded: many openings without an end would each search the whole text."""


class Refused(UserError):
    """A task needs something that is not offered here. Other tasks of the source can still run."""


class HarborAgent(msgspec.Struct, frozen=True, kw_only=True):
    """[agent], also of a step."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: Mode | None = None
    allowed_hosts: list[str] | None = None


class HarborHealthcheck(msgspec.Struct, frozen=True, kw_only=True):
    """A command that tests whether the environment is ready, like Docker's HEALTHCHECK."""

    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Annotated[float, msgspec.Meta(ge=0, le=LONGEST_SECONDS)] = 0.0
    start_interval_sec: Seconds = 5.0
    retries: Count = 3


class HarborMcpServer(msgspec.Struct, frozen=True, kw_only=True):
    """One of [[environment.mcp_servers]]."""

    name: Text
    transport: str = "sse"
    url: str = ""
    command: str = ""
    args: list[str] = []


class HarborEnvironment(msgspec.Struct, kw_only=True):
    """[environment]. `resolved` moves sizes of older schemas and `allow_internet` into today's keys."""

    build_timeout_sec: Seconds | None = None
    docker_image: str | None = None
    os: str = "linux"
    cpus: Share | None = None
    memory_mb: Count | None = None
    storage_mb: Count | None = None
    memory: str | None = None
    storage: str | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[HarborMcpServer] = []
    env: dict[str, str] = {}
    skills_dir: str | None = None
    healthcheck: HarborHealthcheck | None = None
    workdir: str | None = None
    network_mode: Mode | None = None
    allowed_hosts: list[str] | None = None
    allow_internet: bool | None = None


class HarborArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """A path whose content reaches a separate verifier. `destination` only matters to Harbor's own results."""

    source: Text
    destination: str | None = None
    exclude: list[Text] = []
    service: Name | None = None


class HarborCollect(msgspec.Struct, frozen=True, kw_only=True):
    """One of [[verifier.collect]]: a command that writes artifacts when the agent has ended."""

    command: Text
    service: Name = MAIN
    timeout_sec: Seconds = 60.0
    user: str | int | None = None


Artifacts = list[str | HarborArtifact]


class HarborVerifier(msgspec.Struct, kw_only=True):
    """[verifier], also of a step."""

    timeout_sec: Seconds | None = None
    env: dict[str, str] = {}
    user: str | int | None = None
    network_mode: Mode | None = None
    allowed_hosts: list[str] | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: HarborEnvironment | None = None
    collect: list[HarborCollect] = []


class HarborSolution(msgspec.Struct, kw_only=True):
    """[solution]"""

    env: dict[str, str] = {}


class HarborStep(msgspec.Struct, frozen=True, kw_only=True):
    """One of [[steps]]."""

    name: Annotated[str, msgspec.Meta(pattern=STEP_NAME)]
    agent: HarborAgent = HarborAgent()
    verifier: HarborVerifier = msgspec.field(default_factory=HarborVerifier)
    min_reward: float | dict[str, float] | None = None
    healthcheck: HarborHealthcheck | None = None
    artifacts: Artifacts = []


class HarborFile(msgspec.Struct, frozen=True, kw_only=True):
    """All of task.toml."""

    version: str = ""
    schema_version: str = ""
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    agent: HarborAgent = HarborAgent()
    verifier: HarborVerifier = msgspec.field(default_factory=HarborVerifier)
    environment: HarborEnvironment = msgspec.field(default_factory=HarborEnvironment)
    solution: HarborSolution = msgspec.field(default_factory=HarborSolution)
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: Annotated[list[HarborStep], msgspec.Meta(max_length=MAX_STEPS)] = []
    artifacts: Artifacts = []


def refuse(directory: Path, what: str, why: str) -> NoReturn:
    """Raise Refused: leave this task out."""
    raise Refused(f"{directory}: {what} {why}")


def verifiers_of(file: HarborFile) -> list[HarborVerifier]:
    """The verifier of the task, and those of its steps."""
    return [file.verifier, *(step.verifier for step in file.steps)]


def environments_of(file: HarborFile) -> list[HarborEnvironment]:
    """The environment of the agent, and those of verifiers."""
    return [file.environment, *(judge.environment for judge in verifiers_of(file) if judge.environment)]


def resolved(file: HarborFile, directory: Path) -> None:
    """Refuse keys that are not offered, and move keys of older schemas into today's. Changes `file`."""
    for what, why in _lacking(file, directory):
        refuse(directory, what, why)
    verifiers, environments = verifiers_of(file), environments_of(file)
    for environment in environments:
        environment.memory_mb = environment.memory_mb or _megabytes(environment.memory, "memory", directory)
        environment.storage_mb = environment.storage_mb or _megabytes(environment.storage, "storage", directory)
        if environment.network_mode is None and environment.allow_internet is not None:
            environment.network_mode = "public" if environment.allow_internet else "no-network"
    with_env: list[HarborEnvironment | HarborVerifier | HarborSolution] = [*environments, *verifiers, file.solution]
    for table in with_env:
        table.env = {name: _filled(value, f"env.{name}", directory) for name, value in table.env.items()}


def _lacking(file: HarborFile, directory: Path) -> Iterator[tuple[str, str]]:
    yield from _environment_lacks("environment", file.environment)
    for place in (directory, *(directory / "steps" / step.name for step in file.steps)):
        if (place / "trajectory.json").exists():
            yield "trajectory.json", "is not offered: agents begin without a history"
    for name, agent, judge in (
        ("", file.agent, file.verifier),
        *((f"steps.{step.name}.", step.agent, step.verifier) for step in file.steps),
    ):
        if name and agent.network_mode not in (None, file.agent.network_mode):
            yield f"{name}agent.network_mode", "is not offered: the network is the same in all steps"
        yield from _phase_lacks(f"{name}agent", agent.network_mode, agent.user)
        yield from _phase_lacks(f"{name}verifier", judge.network_mode, judge.user)
        if judge.environment is not None:
            yield from _environment_lacks(f"{name}verifier.environment", judge.environment)
        yield from _collection_lacks(f"{name}verifier.collect", judge.collect)


def _environment_lacks(name: str, environment: HarborEnvironment) -> Iterator[tuple[str, str]]:
    if environment.os.lower() != "linux":
        yield f"{name}.os = {environment.os!r}", "is not offered: sandboxes are Linux containers"
    if environment.gpus or environment.tpu:
        yield f"{name}.gpus" if environment.gpus else f"{name}.tpu", "is not offered: sandboxes have none"
    for server in environment.mcp_servers:
        if server.transport not in ("stdio", "streamable-http"):
            key = f"{name}.mcp_servers.{shortened(server.name)}.transport = {shortened(repr(server.transport))}"
            yield key, "is not offered: agents speak stdio and streamable-http with MCP servers"
    if environment.skills_dir:
        yield f"{name}.skills_dir", "is not offered: agents are started without skills"
    yield from _phase_lacks(name, environment.network_mode, None)


def _collection_lacks(name: str, entries: Sequence[HarborCollect]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        if entry.service == MAIN:
            yield from _phase_lacks(name, None, entry.user)
        elif entry.user is not None:
            yield f"{name}.user = {entry.user!r}", "is not offered: in a service, commands run as its image's user"


def _phase_lacks(phase: str, mode: Mode | None, user: str | int | None) -> Iterator[tuple[str, str]]:
    if mode == "allowlist":
        yield f"{phase}.network_mode = 'allowlist'", "is not offered: a sandbox reaches the model, or everything"
    if user not in (None, "root", 0, "0"):
        yield f"{phase}.user = {user!r}", "is not offered: agent and tests are root of the sandbox"


def _megabytes(size: str | None, key: str, directory: Path) -> int | None:
    if size is None:
        return None
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([KMG])", size.strip().upper())
    if not match or not (megabytes := int(float(match[1]) * UNITS[match[2]])):
        raise UserError(
            f"{directory / 'task.toml'}: environment.{key}: {shortened(repr(size))} is no size; write 512M or 2G, say"
        )
    return megabytes


def _filled(value: str, key: str, directory: Path) -> str:
    """The value with each template replaced by its default. This machine's variables are never read."""

    def default(match: re.Match[str]) -> str:
        if match[2] is None:
            refuse(directory, f"{key} = {match[0]!r}", "is not offered: no variable of this machine enters a sandbox")
        return match[2]

    return TEMPLATE.sub(default, value)


def unknown(table: dict[str, Any]) -> dict[str, Any]:
    """The keys that no version of the schema knows, by dotted name."""
    return dict(_unknown(table, HarborFile, ""))


def _unknown(table: dict[str, Any], known: type[msgspec.Struct], prefix: str) -> Iterator[tuple[str, Any]]:
    for field in msgspec.structs.fields(known):
        inner = table.get(field.name)
        if isinstance(inner, dict) and isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from _unknown(inner, field.type, f"{prefix}{field.name}.")
    for name in table.keys() - set(known.__struct_fields__):
        yield f"{prefix}{name}", table[name]
