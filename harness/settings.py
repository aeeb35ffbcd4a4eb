"""The settings of a run: a TOML file, flags, or both. Every flag is a key of the file, and a flag overrides it.

Relative paths in the file are relative to it. Left out: what a task says itself (harness/tasks).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from harness.agents import agent_named
from harness.agents.mix import Scaffold, check
from harness.agents.one_call import AGENT
from harness.anchors import Way
from harness.environment.augment import KINDS, Kind
from harness.integrity.watch import Action
from proxy.pool.errors import UserError
from proxy.pool.rollouts.prompt_variations import PROMPT_KINDS, PromptKind
from proxy.pool.settings_file import (
    Count,
    FilePath,
    NotNegative,
    Port,
    Seconds,
    Share,
    absolute,
    checked,
    demand,
    read_table,
    with_absolute_paths,
    without_dropped_keys,
)

SandboxKind = Literal["auto", "docker", "bubblewrap", "process"]
Bundles = Literal["volume", "bind"]
AnyKind = Literal[Kind, PromptKind]
ALL_KINDS: tuple[AnyKind, ...] = (*KINDS, *PROMPT_KINDS)
SANDBOXES = get_args(SandboxKind)
WAYS = get_args(Way)
ACTIONS = get_args(Action)
BUNDLES = get_args(Bundles)
IMAGE = "debian:bookworm-slim"
"""Docker image of tasks that name none."""


class AgentEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One [[agents]] of the file."""

    agent: str
    """Name of an agent (`harness agents install --help` lists them), or `command`."""
    command: str | None = None
    """Command line of the agent `command`."""
    name: str = ""
    """Name in the pool and in tables. Empty: the agent's name."""
    weight: float = 1
    """How often this agent is chosen, relative to the other agents' weights."""
    held_out: bool = False
    """Use this agent for evaluation: its rollouts are recorded but never trained on."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every key of a run's file."""

    tasks: FilePath | tuple[FilePath, ...]
    """JSONL files, Harbor task directories, directories of those, globs, or one mix file (docs/tasks.md)."""
    agent: str | None = None
    """The run's only agent, instead of `agents`. Runs whose tasks need one model call each do without."""
    command: str | None = None
    """Command line of the agent `command`."""
    agents: tuple[AgentEntry, ...] = ()
    """Several agents that share the run."""
    group_size: Count = 1
    """Rollouts per task that count."""
    redundant: NotNegative = 0
    """Further rollouts per task; the last ones to finish are cancelled. Favours short rollouts."""
    concurrency: Count = 4
    """Maximum rollouts in progress at once."""
    starting: Count | None = None
    """Maximum rollouts setting up a sandbox at once. Default: `concurrency`."""
    verifying: Count | None = None
    """Maximum rollouts running their verifier at once. Default: `concurrency`."""
    seconds: Seconds | None = None
    """Maximum wall-clock time of an agent. Default: the task's limit, which also applies where it is lower."""
    turns: Count | None = None
    """Maximum model calls of an attempt. Default: the task's limit."""
    tokens: Count | tuple[tuple[NotNegative, Count], ...] | None = None
    """Maximum sampled tokens of an attempt, or a list of [step, tokens] with the limits of groups that are opened from
    these train steps on. Default: the task's limit."""
    hung_seconds: Seconds = 3600
    """An agent is stopped as hung after this long without output and without a finished model call."""
    engine_patience: Seconds = 1800
    """The run ends when no engine has been up for this long. Until then its calls wait, and their agents' clocks stand
    still."""
    run_dir: FilePath | None = None
    """Directory of the run; the same directory resumes it. Default: runs/<verb>-<tasks>-<agent>."""
    name: str | None = None
    """Name of the run in the pool. Default: the name of the run directory."""
    proxy: str | None = None
    """URL of a running proxy. Default: the run starts its own."""
    admin_key_file: FilePath | None = None
    """File with the admin key of the running proxy, if it has one."""
    pool: FilePath | None = None
    """SQLite file or database URL. Default: the proxy's pool."""
    model: FilePath | None = None
    """Model directory for the run's own proxy. Default: a tiny model with random weights."""
    scripted: FilePath | None = None
    """FILE.py:NAME of a scripted engine, used instead of the real one."""
    augment: tuple[AnyKind, ...] = ()
    """Kinds of variations: of the environment, for tasks that declare none, and of what the model is shown
    (docs/augmentation.md)."""
    judge: str | None = None
    """OpenAI-compatible endpoint, ending in /v1, that grades answers of tasks whose checker is a judge."""
    judge_model: str | None = None
    """Model at that endpoint."""
    judge_key_file: FilePath | None = None
    """File with the API key of that endpoint, if it needs one."""
    reward: str | None = None
    """Gives rollouts their rewards after the verifier: package.module:function, or a judge file ending in .toml
    (docs/rewards.md)."""
    integrity: Action | None = None
    """Look whether rollouts cheat, and tell it, mask those that do, or give them the reward 0 (docs/integrity.md)."""
    integrity_judge: FilePath | None = None
    """Judge file whose models look at rollouts that detectors name."""
    integrity_share: Share = 0
    """Share of the other rollouts with a reward that these judges look at too."""
    resample: str | None = None
    """Name of a run in the pool: groups begin with the first turns of its recorded successes (docs/runs.md)."""
    anchors: Way = "rollback"
    """How many turns. rollback: from the last turn backwards, until success drops. parallel: any number, at random."""
    sandbox: SandboxKind = "auto"
    """Kind of sandbox. auto: docker if a daemon answers, else bubblewrap if it works, else process."""
    image: str = IMAGE
    """Docker image of tasks that name none."""
    show: tuple[FilePath, ...] = ()
    """Files and directories of this machine that bubblewrap sandboxes may read, such as your own agent."""
    relay: bool = False
    """Reach the proxy from Docker sandboxes through a relay container, as daemons on other machines always do."""
    bundles: Bundles = "volume"
    """How agents get into containers. bind: nothing is uploaded, but the daemon must see this machine's files."""
    limit: Count | None = None
    """Take only the first tasks."""
    seed: int = 0
    """Seed of the order of tasks and agents, and of environment variations."""
    epochs: NotNegative = 1
    """How often each task is run. 0: repeat the tasks until the run is stopped."""
    until_step: Count | None = None
    """Repeat the tasks until the training run has published this step."""
    eval_tasks: FilePath | None = None
    """Evaluate the training run's policy on these tasks while it trains: every agent of the run, held out or not, at
    each task once (docs/runs.md)."""
    eval_every: Count = 10
    """Train steps between two evaluations. In any case the initial weights are evaluated, and the first pushed version
    at or after `until_step`."""
    eval_hold: bool = False
    """Where there are several engines, leave one at the evaluated version until its evaluation has ended."""
    ray: str | None = None
    """Run attempts on the nodes of this Ray cluster: HOST:PORT of its head node, or auto for RAY_ADDRESS or the cluster
    that this machine belongs to. Default: attempts run in this process."""
    docker: tuple[str, ...] = ()
    """Docker daemons: ADDRESS, ADDRESS=WEIGHT or ADDRESS=WEIGHT/LIMIT. Default: DOCKER_HOST or the Docker context."""
    runtime: tuple[str, ...] = ()
    """Runtimes of Docker containers: PROFILE=NAME, such as strict=runsc. Default: the daemon's."""
    warm: NotNegative = 0
    """Spare containers kept ready for each kind of sandbox that was used lately."""
    metrics_port: Port | None = None
    """Serve the sandboxes' metrics at 127.0.0.1:PORT/metrics."""

    def __post_init__(self) -> None:
        steps = [step for step, _ in self.tokens] if isinstance(self.tokens, tuple) else [0]
        demand(
            steps[:1] == [0] and all(step < later for step, later in pairwise(steps)),
            f"the steps of tokens = {self.tokens} are {steps}; begin with step 0 and let each be later than the last",
        )
        demand(
            not (self.resample and self.augment),
            f"augment = {list(self.augment)} varies what a recorded attempt met, so that it cannot be repeated; drop "
            f"it, or resample = {self.resample}",
        )
        demand(
            self.integrity is not None or not (self.integrity_judge or self.integrity_share),
            "integrity_judge and integrity_share say how rollouts that may cheat are judged; set integrity too",
        )
        demand(
            self.integrity_judge is not None or not self.integrity_share,
            f"integrity_share = {self.integrity_share:g} is what judges look at; name them with integrity_judge",
        )
        demand(
            self.anchors == "rollback" or self.resample is not None,
            f"anchors = {self.anchors} is a way to choose where recorded attempts are left; set resample too",
        )

        demand(
            self.eval_tasks is not None or (self.eval_every == 10 and not self.eval_hold),
            f"eval_every = {self.eval_every} and eval_hold = {self.eval_hold} say how a training run is evaluated; set "
            "eval_tasks too",
        )
        demand(
            self.eval_tasks is None or self.until_step is not None,
            f"eval_tasks = {self.eval_tasks} evaluates a training run while it trains; set until_step, or use "
            "`harness eval` for weights that are not trained",
        )

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.tasks,) if isinstance(self.tasks, str) else self.tasks

    def scaffolds(self, purpose: str) -> list[Scaffold]:
        """Return the agents, ready to start; UserError when they cannot share a run."""
        if self.agents and (self.agent or self.command):
            raise UserError("the run has both `agent` and `agents`; name its agents in one of them")
        if not self.agents and self.agent is None:
            raise UserError("the run has no agent; give --agent NAME, or [[agents]] in its file")
        scaffolds = [
            Scaffold(
                name=entry.name or entry.agent,
                agent=agent_named(entry.agent, entry.command),
                weight=entry.weight,
                held_out=entry.held_out,
            )
            for entry in self.agents or (AgentEntry(agent=self.agent or "", command=self.command),)
        ]
        check(scaffolds, purpose)
        return scaffolds

    def where(self, verb: str) -> Path:
        """The run directory."""
        agent = self.agent or "-".join(entry.name or entry.agent for entry in self.agents) or AGENT
        return Path(self.run_dir or Path("runs") / f"{verb}-{Path(self.sources[0]).stem}-{agent}")


def load_settings(given: Sequence[str], flags: Mapping[str, Any]) -> Settings:
    """Read a run's file, or take task sources, and apply the flags that were given; UserError names the key."""
    table: dict[str, Any] = {"tasks": list(given)}
    if (
        len(given) == 1 and given[0].endswith(".toml") and "source" not in (file := read_table(Path(given[0])))
    ):  # a mix file's
        table = _with_judge_file(with_absolute_paths(file, Settings, Path(given[0]).parent), Path(given[0]).parent)
    flags = _with_judge_file({key: value for key, value in flags.items() if value is not None}, Path())
    return checked(table | flags, Settings, given[0])


def _with_judge_file(table: dict[str, Any], base: Path) -> dict[str, Any]:
    """The table, with the path of a judge file made absolute. A reward may be a function's name too."""
    reward = table.get("reward")
    named = isinstance(reward, str) and reward.endswith(".toml")
    return table | {"reward": absolute(reward, base)} if named else table


def stored_settings(table: Mapping[str, Any], where: str) -> Settings:
    """The settings that a run's directory holds, also one that an earlier version began."""
    renamed: dict[str, Any] = {"epochs": 0} if table.get("repeat") else {}
    if table.get("executor") == "ray":
        renamed["ray"] = table.get("ray_address", "auto")
    return checked(without_dropped_keys({**table, **renamed}, Settings), Settings, where)
