"""What a run is told: a TOML file, flags, or both; every flag is a key of the file, and a flag overrides it.

Relative paths in the file are relative to it. Left out: what a task says itself (harness/tasks).
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from harness.agents import agent_named
from harness.agents.mix import Scaffold, check
from harness.agents.one_call import AGENT
from harness.environment.augment import Kind
from proxy.pool.errors import UserError

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
SANDBOXES = ("auto", "docker", "bubblewrap", "process")
IMAGE = "debian:bookworm-slim"
"""Of tasks that name none, in Docker."""
PATHS = ("tasks", "run_dir", "model", "admin_key_file", "scripted", "pool", "judge_key_file", "metrics_file")
"""Keys that name files; an address with a scheme is none."""


class AgentEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One [[agents]] of the file."""

    agent: str
    """Of `harness agents`, or `command`."""
    command: str | None = None
    """The command line of the agent `command`."""
    name: str = ""
    """In the pool and in tables. Empty: the agent's."""
    weight: float = 1
    """How often it is chosen, against the other agents."""
    held_out: bool = False
    """For evaluation: its rollouts are recorded, and never trained."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every key of a run's file."""

    tasks: str | tuple[str, ...]
    """JSONL files, Harbor task directories, directories of those, globs, or one mix file (docs/tasks.md)."""
    agent: str | None = None
    """The run's only agent, instead of `agents`. A run whose tasks only ask for answers needs none."""
    command: str | None = None
    """Command line of the agent `command`."""
    agents: tuple[AgentEntry, ...] = ()
    group_size: Count = 1
    """Rollouts per task that count."""
    redundant: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Rollouts per task beyond them; the last to finish are called off. Favours short rollouts."""
    concurrency: Count = 4
    """Rollouts at work at a time, in all."""
    starting: Count | None = None
    """Of them, those whose sandbox is started and set up. None: all; so for the next two."""
    working: Count | None = None
    """Of them, those whose agent is at work."""
    verifying: Count | None = None
    """Of them, those whose verifier is at work."""
    seconds: Seconds | None = None
    """Time of an agent, where its task does not give less. None: what the task gives; so for the next two."""
    turns: Count | None = None
    """Model calls of an attempt."""
    tokens: Count | None = None
    """Tokens that an attempt may sample."""
    hung_seconds: Seconds = 3600
    """After so long without output and without a model call that ends, an agent is ended as hung."""
    run_dir: str | None = None
    """Where the run lives, to resume it. None: runs/<verb>-<tasks>-<agent>."""
    name: str | None = None
    """Name of the run in the pool. None: that of the run directory."""
    proxy: str | None = None
    """URL of a running proxy. None: one is brought up."""
    admin_key_file: str | None = None
    """The running proxy's admin key, if it has one."""
    pool: str | None = None
    """SQLite file or database URL. None: the proxy's."""
    model: str | None = None
    """Model directory for the proxy that is brought up. None: a tiny one with random weights."""
    scripted: str | None = None
    """FILE.py:NAME of a scripted engine in place of the real one."""
    augment: tuple[Kind, ...] = ()
    """Kinds of variations of the environment, for tasks that declare none (docs/tasks.md, "Augmentation")."""
    judge: str | None = None
    """Endpoint that grades answers of tasks whose checker is a judge; any OpenAI-compatible one, ending in /v1."""
    judge_model: str | None = None
    """The model there."""
    judge_key_file: str | None = None
    """Its API key, if it wants one."""
    sandbox: Literal["auto", "docker", "bubblewrap", "process"] = "auto"
    """Kind of the sandboxes. auto: docker where an engine answers, else bubblewrap where it works, else process."""
    image: str = IMAGE
    """Of tasks that name none, in Docker."""
    show: tuple[str, ...] = ()
    """Files and directories of this machine that bubblewrap sandboxes may read, such as an agent of your own."""
    relay: bool = False
    """Docker's sandboxes reach the proxy through a relay container, as they do on engines of other machines."""
    bundles: Literal["volume", "bind"] = "volume"
    """How agents get into containers. bind: nothing is uploaded, but the engine must see this machine's files."""
    limit: Count | None = None
    """Take the first tasks only."""
    seed: int = 0
    """Of the order of tasks and agents, and of what varies in environments."""
    epochs: Count = 1
    """How often to run each task."""
    repeat: bool = False
    """Go through the tasks until stopped."""
    until_step: Count | None = None
    """Feed a training run until it has published this step."""
    executor: Literal["local", "ray"] = "local"
    """Where attempts are made: in this process, or on the nodes of a Ray cluster."""
    ray_address: str = "auto"
    """HOST:PORT of the cluster's head node. auto: RAY_ADDRESS, or the cluster that this machine is a node of."""
    attempt_cpus: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """CPUs of a node that an attempt takes while it is made there."""
    docker: tuple[str, ...] = ()
    """Docker engines, each ADDRESS, ADDRESS=WEIGHT or ADDRESS=WEIGHT/LIMIT. Empty: DOCKER_HOST, or the local one."""
    warm: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Spare containers that are kept ready for each kind of sandbox that was asked for lately."""
    metrics_port: Annotated[int, msgspec.Meta(ge=1, le=65535)] | None = None
    """Shows the sandboxes' metrics at 127.0.0.1:PORT/metrics."""
    metrics_file: str | None = None
    """Has them written to this file every 5 s."""

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.tasks,) if isinstance(self.tasks, str) else self.tasks

    def scaffolds(self, purpose: str) -> list[Scaffold]:
        """The agents, each found ready to start; UserError when they cannot share a run."""
        if self.agents and (self.agent or self.command):
            raise UserError("the run has both `agent` and `agents`; name its agents in one of them")
        if not self.agents and self.agent is None:
            raise UserError("the run has no agent; give --agent NAME, or [[agents]] in its file")
        found = [
            Scaffold(
                name=entry.name or entry.agent,
                agent=agent_named(entry.agent, entry.command),
                weight=entry.weight,
                held_out=entry.held_out,
            )
            for entry in self.agents or (AgentEntry(agent=self.agent or "", command=self.command),)
        ]
        check(found, purpose)
        return found

    def where(self, verb: str) -> Path:
        """The run directory."""
        agent = self.agent or "-".join(entry.name or entry.agent for entry in self.agents) or AGENT
        return Path(self.run_dir or Path("runs") / f"{verb}-{Path(self.sources[0]).stem}-{agent}")


def load_settings(given: Sequence[str], flags: Mapping[str, Any]) -> Settings:
    """The settings of a run's file, or of task sources, with the flags that were given; UserError names the key."""
    told: dict[str, Any] = {"tasks": list(given)}
    if len(given) == 1 and given[0].endswith(".toml") and "source" not in (file := _read(Path(given[0]))):
        told = _absolute(file, Path(given[0]).parent)  # a mix file has sources
    return checked(told | {key: value for key, value in flags.items() if value is not None}, given[0])


def checked(told: Mapping[str, Any], where: str) -> Settings:
    """The settings; UserError for an unknown key or a value that cannot be."""
    try:
        return msgspec.convert(told, Settings)
    except msgspec.ValidationError as error:
        reason, _, at = str(error).partition(" - at `$")
        key = at.strip("`.") or "the file"
        raise UserError(f"{where}: {key}: {reason}; see harness/settings.py for its keys") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"the file {path} cannot be read ({error.strerror}); name an existing one") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the file {path} is no TOML ({error}); correct it") from error


def _absolute(told: dict[str, Any], base: Path) -> dict[str, Any]:
    found = dict(told)
    for key in PATHS:
        if isinstance(told.get(key), str):
            found[key] = absolute(told[key], base)
    for key in ("tasks", "show"):
        if isinstance(told.get(key), list):
            found[key] = [absolute(path, base) for path in told[key]]
    return found


def absolute(path: str, base: Path) -> str:
    """A path of a file as seen from anywhere; an address with a scheme is none."""
    return path if "://" in path else str((base / path).absolute())
