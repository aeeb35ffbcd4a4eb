"""The task record, the same for JSON lines and Harbor directories. docs/tasks.md describes every field.

Each default is the strictest, so a task's own text shows what it relaxes. Directories of this machine are named by
absolute path; the loader stores a digest of their content (`digest`).
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from harness.tasks.verdict_options import Augment, Clean, Patterns, Strict
from sandboxes.base import Limits, Network, Profile, User

LONGEST_SECONDS = 30 * 24 * 3600
Seconds = Annotated[float, msgspec.Meta(gt=0, le=LONGEST_SECONDS)]
Count = Annotated[int, msgspec.Meta(gt=0, le=2**31 - 1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1_000_000)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Files = dict[Text, str]
Directories = dict[Text, Text]
Domain = Literal["agent", "reasoning", "qa"]

MAX_INSTRUCTION = 100_000
"""Bytes. The instruction is an argument of the agent's process, and Linux allows at most 128 KiB for one."""
MAX_PATTERN = 2000
"""Characters of a checker's regular expression. Python needs seconds to compile one that is longer and hostile."""
MAX_NAME = 200
"""Characters of an id and of a step's name."""
MAX_SERVICES = 64
MAX_STEPS = 1000
MAX_CASES = 1000
SERVICE_NAME = r"[a-z0-9][a-z0-9_.-]*"
IN_SERVICE = re.compile(f"({SERVICE_NAME}):(?=/)")


class TaskImage(Strict, frozen=True, kw_only=True):
    """The image that a sandbox's file system starts from."""

    name: str = ""
    """Name of an image. With a directory without Dockerfile: the image that its files are copied into."""
    directory: str = ""
    """Built by its Dockerfile, or copied into the working directory. Relative to the file that names it."""
    dockerfile: Text = "Dockerfile"
    """Relative to `directory`."""


class TaskService(Strict, frozen=True, kw_only=True):
    """A service beside the sandbox in the same network, for example a database."""

    name: Annotated[str, msgspec.Meta(pattern=rf"^{SERVICE_NAME}\Z")]
    """Host name of the service inside the sandbox."""
    image: TaskImage
    """What it runs."""
    command: tuple[str, ...] = ()
    """Command line. Empty: the image's own."""
    env: dict[str, str] = {}
    """Environment variables of its processes."""
    ready: str = ""
    """Shell command in the service that exits with 0 when it is ready. Empty: ready as soon as it runs."""
    ready_timeout: Seconds = 60
    """Wall seconds in which it must be ready."""


class McpServer(Strict, frozen=True, kw_only=True):
    """A server whose tools the agent gets (Model Context Protocol). It has a command or a URL."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,62}\Z")]
    """Agents put it before the names of the server's tools."""
    command: tuple[Text, ...] = ()
    """Program and arguments. The agent starts it in its sandbox and speaks over its standard input and output."""
    env: dict[str, str] = {}
    """Environment variables of the program. Which of the agent's it sees beside them depends on the agent."""
    url: str = ""
    """Address of a server that runs already, for example in a service. Spoken to over (streamable) HTTP."""

    @property
    def spoken(self) -> str:
        """stdio or http."""
        return "stdio" if self.command else "http"


class Artifact(Strict, frozen=True, kw_only=True):
    """A file or directory of the agent's that the verdict is about."""

    path: Text
    """Relative to the working directory, `~/` for the agent's home, or absolute. SERVICE:/PATH: in a service."""
    exclude: Patterns = []
    """What stays behind: the end of a path below `path`, or a glob for it."""

    @property
    def service(self) -> str:
        """The service that it comes from. Empty: the agent's sandbox."""
        return inside[1] if (inside := IN_SERVICE.match(self.path)) else ""

    @property
    def place(self) -> str:
        """Its path there, and in the fresh sandbox."""
        return self.path.removeprefix(f"{self.service}:") if self.service else self.path


class Case(Strict, frozen=True, kw_only=True):
    """One program or function of the agent's, and what must come out. Only the input enters the sandbox."""

    name: str = ""
    """Names it in the reward's parts. Empty: its number."""
    command: str = ""
    """Shell command, run as the agent's user in the working directory."""
    input: str = ""
    """What the command reads."""
    output: str | None = None
    """What it must print. None: anything."""
    exit_code: int = 0
    """How the command must end."""
    call: Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*)?\Z")] = ""
    """Instead of a command: MODULE:FUNCTION of the working directory, called by python3."""
    args: list[Any] = []
    """Arguments of the function, as JSON."""
    returns: Any = None
    """What the function must return, as JSON."""
    timeout: Seconds = 10
    """Wall seconds. A case that takes longer is wrong."""
    weight: Share = 1
    """Its share of the reward, against the other cases'."""


class Collect(Strict, frozen=True, kw_only=True):
    """A command that writes artifacts when the agent has ended."""

    command: Text
    """Shell command."""
    timeout: Seconds = 60
    """Wall seconds."""
    service: str = ""
    """The service that it runs in, as its image's user. Empty: the agent's sandbox, as root."""


class TaskLimits(Strict, frozen=True, kw_only=True):
    """Limits of the sandbox, and of each command in it: set-up, agent and verifier."""

    memory_mb: Count | None = 4096
    """Memory of all processes of the sandbox together. None: unlimited."""
    cpus: Share | None = None
    """CPUs that the sandbox may use at once. None: all."""
    pids: Count | None = 1024
    """Processes and threads at once. None: unlimited."""
    disk_mb: Count | None = 4096
    """Disk space of each writable place."""
    cpu_seconds: Seconds | None = None
    """CPU time of one command. None: unlimited."""
    output_kb: Count = 1024
    """Output that is kept of each command."""
    system_calls: tuple[str, ...] = ()
    """Names of system calls that the sandbox's filter would refuse."""


class VerifierEnvironment(Strict, frozen=True, kw_only=True):
    """A verifier's own sandbox, where it is judged fresh. The task's files and set-up do not enter it."""

    image: TaskImage | None = None
    """None: the task's, with its services."""
    work: str = ""
    """Working directory. Empty: the image's."""
    env: dict[str, str] = {}
    """Environment variables of its set-up and of the verifier, in place of the task's."""
    limits: TaskLimits = TaskLimits()
    """What the sandbox and each command in it may use."""
    setup: str = ""
    """Shell command before the agent's artifacts enter, with the task's `setup_timeout`."""


class Verifier(Strict, frozen=True, kw_only=True):
    """How the verdict on the agent's work is made. harness/verdict/rewards.py says what counts as a reward."""

    command: str = ""
    """Shell command. A task of domain `agent` needs one, or cases."""
    cases: Annotated[list[Case], msgspec.Meta(max_length=MAX_CASES)] = []
    """Instead of a command: what is run and what must come out, judged outside of the sandbox."""
    files: Files = {}
    """Path -> text, written after the agent has ended and its processes are gone."""
    directories: Directories = {}
    """Path in the sandbox -> directory here; whatever the agent put there is removed first."""
    rewards: Literal["exit", "logs"] = "exit"
    """exit: exit code and $REWARD_FILE. logs: /logs/verifier/reward.json or reward.txt, whatever the exit code."""
    range: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest reward. One outside is no verdict."""
    timeout: Seconds = 120
    """Wall seconds; a verifier that takes longer gives no verdict."""
    user: User = "verifier"
    """User who runs the command."""
    where: Literal["fresh", "shared"] | None = None
    """fresh: in a new sandbox, into which only data of the agent's travels. shared: in the agent's own.
    None: fresh where sandboxes isolate and the task keeps no daemons (harness/tasks/where.py)."""
    artifacts: list[Artifact] = []
    """What travels into a fresh sandbox. Empty: the working directory. What a service leaves counts over the rest."""
    carry: Literal["files", "changes"] = "files"
    """files: the artifacts as the agent left them. changes: only what it changed, beside what set-up makes afresh."""
    collect: list[Collect] = []
    """Commands before the artifacts are carried. One that fails is passed over."""
    environment: VerifierEnvironment | None = None
    """A fresh sandbox other than the task's. None: one like the agent's."""
    keep: Patterns = []
    """Paths that steer verifiers but that the agent may create or change, such as conftest.py.
    See harness/environment/protected_files.py."""
    network: Network | None = None
    """Network of the verifier. None: the task's."""
    env: dict[str, str] = {}
    """Environment variables, in addition to the task's."""


class Checker(Strict, frozen=True, kw_only=True):
    """How the verdict on an answer is made, in the domains `reasoning` and `qa`."""

    kind: Literal["exact", "regex", "math", "code", "judge"]
    """How answer and reference are compared."""
    answer: str = ""
    """exact, math: the right answer. judge: a reference for the judge, or empty."""
    pattern: str = ""
    """regex: searched anywhere in the answer."""
    path: str = "answer.py"
    """code: file for the answer's last code block, which the task's verifier then judges in a sandbox."""
    rubric: str = ""
    """judge: what makes an answer good."""


class Solution(Strict, frozen=True, kw_only=True):
    """The oracle solution. Only `harness validate` runs it."""

    command: Text
    """Shell command, run where and as the agent would work."""
    directories: Directories = {}
    """Path in the sandbox -> directory here."""
    env: dict[str, str] = {}
    """Environment variables, in addition to the task's."""


class Step(Strict, frozen=True, kw_only=True):
    """One step of a task: an agent and a verdict of its own, in one sandbox for all steps. None: the task's value."""

    name: Text
    """Name of the step, once per task."""
    instruction: Text
    """Text for the agent in this step."""
    verifier: Verifier
    """How the verdict on this step is made."""
    directories: Directories = {}
    """Copied in before the step's set-up."""
    setup: str = ""
    """Shell command before the step's agent starts."""
    timeout: Seconds | None = None
    """Wall seconds of the step's agent."""
    min_reward: float | dict[str, float] | None = None
    """Skip the further steps when a reward of this step is lower. A number stands for {"reward": number}."""
    solution: Solution | None = None
    """The oracle solution of this step."""


class Task(Strict, frozen=True, kw_only=True):
    """One task."""

    id: Text
    """Name of the task, once per source."""
    instruction: str = ""
    """Text for the agent. Needed, unless the steps have instructions of their own."""
    domain: Domain = "agent"
    """agent: an agent works in a sandbox. reasoning, qa: one model call, whose answer is checked."""
    verifier: Verifier = Verifier()
    """How the verdict on the agent's work is made. A task of domain `agent` needs one."""
    checker: Checker | None = None
    """Only for the domains reasoning and qa."""
    steps: Annotated[tuple[Step, ...], msgspec.Meta(max_length=MAX_STEPS)] = ()
    """Parts that are worked on one after the other in one sandbox."""
    steps_reward: Literal["mean", "final"] = "mean"
    """The task's reward: the mean over the steps that were judged, or the last one's."""
    image: TaskImage | None = None
    """None: the back end's default."""
    services: Annotated[tuple[TaskService, ...], msgspec.Meta(max_length=MAX_SERVICES)] = ()
    """Started in this order before set-up, each when the one before it is ready."""
    mcp: Annotated[tuple[McpServer, ...], msgspec.Meta(max_length=MAX_SERVICES)] = ()
    """MCP servers whose tools the agent gets. docs/agents.md says which agents have MCP."""
    profile: Profile = "strict"
    """strict: unprivileged, read-only root. harbor: root of a user namespace, writable root."""
    network: Network = "model"
    """model: the proxy's model routes and nothing else. none. full: the Internet, in Docker nothing near or private."""
    reach: tuple[str, ...] = ()
    """Networks (ADDRESS or ADDRESS/BITS) that a `full` network reaches although they are private or near."""
    work: str = ""
    """Working directory in the sandbox. Empty: the image's."""
    files: Files = {}
    """Path -> text, written before set-up. Relative to the agent's working directory; `~/` is its home."""
    directories: Directories = {}
    """Path in the sandbox -> directory here, copied in before set-up."""
    setup: str = ""
    """Shell command before the agent starts."""
    setup_timeout: Seconds = 120
    """Wall seconds of set-up."""
    daemons: bool = False
    """Keep processes that set-up leaves running while the agent works and the verifier judges."""
    clean: Clean = Clean()
    """What to do with leftovers before the agent starts."""
    augment: Augment | None = None
    """Variations of the environment between attempts. None: the run's."""
    timeout: Seconds = 600
    """Wall seconds of the agent. After that it is ended, and the verifier judges its work so far."""
    max_turns: Count | None = None
    """Maximum model calls of the agent."""
    max_tokens: Count | None = None
    """Maximum tokens that the model samples for the agent."""
    limits: TaskLimits = TaskLimits()
    """What the sandbox and each command in it may use."""
    env: dict[str, str] = {}
    """Environment variables of set-up, agent and verifier."""
    solution: Solution | None = None
    """The oracle solution, which only `harness validate` runs."""
    metadata: dict[str, Any] = {}
    """Stored with the rollout, never shown to the agent."""
    digest: str = ""
    """Digest of the directories' content, set by the loader."""

    def verifier_env(self) -> dict[str, str]:
        """Environment variables of the verifier."""
        own = self.verifier.environment
        return (self.env if own is None else own.env) | self.verifier.env

    def command_limits(self, seconds: float) -> Limits:
        """Limits of one command in this task's sandbox, at most `seconds` long."""
        return Limits(seconds=seconds, cpu_seconds=self.limits.cpu_seconds, output_bytes=self.limits.output_kb << 10)


@dataclass(frozen=True)
class TaskPart:
    """A step as a task of its own. A task without steps is its only part."""

    task: Task
    name: str = ""
    min_reward: float | dict[str, float] | None = None
    more: bool = False
    """Another part follows."""
    before: tuple[Task, ...] = ()
    """The parts before this one."""


def parts_of(task: Task) -> tuple[TaskPart, ...]:
    """The parts of a task, which are worked on one after the other in one sandbox."""
    if not task.steps:
        return (TaskPart(task),)
    alone = tuple(_alone(task, step, first=step is task.steps[0]) for step in task.steps)
    return tuple(
        TaskPart(alone[number], step.name, step.min_reward, number + 1 < len(alone), alone[:number])
        for number, step in enumerate(task.steps)
    )


def built_images(task: Task) -> Iterator[TaskImage]:
    """The images of a task that come from a directory."""
    owns = [judge.environment for judge in (task.verifier, *(step.verifier for step in task.steps))]
    images = [task.image, *(service.image for service in task.services), *(own.image for own in owns if own)]
    for image in images:
        if image is not None and image.directory:
            yield image


def _alone(task: Task, step: Step, first: bool) -> Task:
    return msgspec.structs.replace(
        task,
        instruction=step.instruction,
        verifier=step.verifier,
        files=task.files if first else {},
        directories=(task.directories if first else {}) | step.directories,
        setup="\n".join(filter(None, (task.setup if first else "", step.setup))),
        timeout=step.timeout or task.timeout,
        solution=step.solution or task.solution,
        steps=(),
    )
