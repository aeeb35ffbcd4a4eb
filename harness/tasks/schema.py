"""What a task is: one record, whether it was a JSON line or a Harbor directory. docs/tasks.md describes every field.

Each default is the strictest; what a task relaxes stands in its own text. A record names directories of this machine by
absolute path; how their content is pinned is the loader's matter (`digest`).
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from harness.tasks.verdict_options import Augment, Clean, Pattern
from sandboxes.base import Limits, Network, Profile, User

Seconds = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(gt=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Files = dict[Text, str]
Directories = dict[Text, Text]
Domain = Literal["agent", "reasoning", "qa"]

MAX_INSTRUCTION = 100_000
"""Bytes. The instruction is an argument of the agent's process, and Linux takes at most 128 KiB for one."""


class Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A struct that takes no field it does not know."""


class TaskImage(Strict, frozen=True, kw_only=True):
    """What the sandbox's file system begins as."""

    name: str = ""
    """An image of the engine; with a directory without Dockerfile, the image that its files are copied into."""
    directory: str = ""
    """Built by its Dockerfile, or copied into the working directory. Relative to the file that names it."""
    dockerfile: Text = "Dockerfile"
    """Relative to `directory`."""


class TaskService(Strict, frozen=True, kw_only=True):
    """What runs beside the sandbox, in the same network: a database, say."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
    """Under which the sandbox finds it."""
    image: TaskImage
    command: tuple[str, ...] = ()
    """Arguments; empty: the image's own."""
    env: dict[str, str] = {}
    ready: str = ""
    """Shell command, in the service, that exits with 0 when it is ready. Empty: as soon as it runs."""
    ready_timeout: Seconds = 60


class Verifier(Strict, frozen=True, kw_only=True):
    """What gives the verdict on what the agent left. harness/verdict/rewards.py says what counts as a reward."""

    command: str = ""
    """Shell command. A task of domain `agent` needs one."""
    files: Files = {}
    """Path -> text, written after the agent has ended and its processes are gone."""
    directories: Directories = {}
    """Path in the sandbox -> directory here; whatever the agent put there is removed first."""
    rewards: Literal["exit", "logs"] = "exit"
    """exit: exit code and $REWARD_FILE. logs: /logs/verifier/reward.json or reward.txt, whatever the exit code."""
    timeout: Seconds = 120
    user: User = "verifier"
    """Who runs the command."""
    fresh: bool = False
    """Judge in a fresh sandbox that only the working directory is carried into."""
    keep: list[Pattern] = []
    """Paths that steer verifiers but that the agent may create or change, such as conftest.py.
    See harness/environment/protected_files.py."""
    network: Network | None = None
    """None: the task's."""
    env: dict[str, str] = {}
    """Over the task's."""


class Checker(Strict, frozen=True, kw_only=True):
    """What gives the verdict on an answer in the domains `reasoning` and `qa`."""

    kind: Literal["exact", "regex", "math", "code", "judge"]
    answer: str = ""
    """exact, math: the right answer. judge: a reference for the judge, or empty."""
    pattern: str = ""
    """regex: found anywhere in the final answer."""
    path: str = "answer.py"
    """code: where the answer's last code block goes; then the task's verifier judges it in a sandbox."""
    rubric: str = ""
    """judge: what makes an answer good."""


class TaskLimits(Strict, frozen=True, kw_only=True):
    """What the sandbox may use, and each command in it: set-up, agent and verifier."""

    memory_mb: Count | None = 4096
    """Of all processes of the sandbox together. None: unlimited."""
    cpus: Share | None = None
    """How many CPUs' worth of time at once. None: all."""
    pids: Count | None = 1024
    disk_mb: Count | None = 4096
    """Of each place that can be written."""
    cpu_seconds: Seconds | None = None
    output_kb: Count = 1024
    """Output of a command that is kept."""


class Solution(Strict, frozen=True, kw_only=True):
    """The oracle: what a perfect agent would do. Only `harness validate` runs it."""

    command: Text
    directories: Directories = {}
    env: dict[str, str] = {}


class Step(Strict, frozen=True, kw_only=True):
    """One part of a task with several: an agent and a verdict each, in one sandbox. What is None is the task's."""

    name: Text
    instruction: Text
    verifier: Verifier
    directories: Directories = {}
    """There before the step's set-up."""
    setup: str = ""
    timeout: Seconds | None = None
    min_reward: float | dict[str, float] | None = None
    """The further steps are left out when a reward of this step is below. A number stands for {"reward": number}."""
    solution: Solution | None = None


class Task(Strict, frozen=True, kw_only=True):
    """One task."""

    id: Text
    instruction: str = ""
    """What the agent is told. Needed, unless there are steps with instructions of their own."""
    domain: Domain = "agent"
    """agent: works in a sandbox. reasoning, qa: one model call, whose answer is checked."""
    verifier: Verifier = Verifier()
    checker: Checker | None = None
    """Of the domains reasoning and qa."""
    steps: tuple[Step, ...] = ()
    steps_reward: Literal["mean", "final"] = "mean"
    """Of the steps that were judged: their mean, or the last one's."""
    image: TaskImage | None = None
    """None: the back end's own."""
    services: tuple[TaskService, ...] = ()
    """Started in this order before set-up, each when the one before it is ready."""
    profile: Profile = "strict"
    """strict: unprivileged, read-only root. harbor: root of a user namespace, writable root."""
    network: Network = "model"
    """model: the proxy's model routes and nothing else. none. full: whatever the host reaches."""
    work: str = ""
    """Working directory in the sandbox. Empty: the image's."""
    files: Files = {}
    """Path -> text, there before set-up. Relative to the agent's working directory; `~/` is its home."""
    directories: Directories = {}
    """Path in the sandbox -> directory here, there before set-up."""
    setup: str = ""
    """Shell command before the agent starts."""
    setup_timeout: Seconds = 120
    daemons: bool = False
    """What set-up leaves running stays while the agent works and the verifier judges."""
    clean: Clean = Clean()
    """What becomes of leftovers before the agent starts."""
    augment: Augment | None = None
    """What differs from attempt to attempt. None: what the run says."""
    timeout: Seconds = 600
    """Wall seconds of the agent. Then it is ended, and the verifier judges what it left."""
    max_turns: Count | None = None
    """Model calls of the agent."""
    max_tokens: Count | None = None
    """Tokens that the model samples for the agent."""
    limits: TaskLimits = TaskLimits()
    env: dict[str, str] = {}
    """Environment of set-up, agent and verifier."""
    solution: Solution | None = None
    metadata: dict[str, Any] = {}
    """Carried along, never shown to the agent."""
    digest: str = ""
    """Of the directories' content; the loader writes it."""

    def command_limits(self, seconds: float) -> Limits:
        """Limits of one command in this task's sandbox, at most `seconds` long."""
        return Limits(seconds=seconds, cpu_seconds=self.limits.cpu_seconds, output_bytes=self.limits.output_kb << 10)


@dataclass(frozen=True)
class TaskPart:
    """A step as a task of its own; a task without steps is its only part."""

    task: Task
    name: str = ""
    min_reward: float | dict[str, float] | None = None
    more: bool = False
    """Another part follows."""


def parts_of(task: Task) -> tuple[TaskPart, ...]:
    """What is worked at one after the other in one sandbox."""
    if not task.steps:
        return (TaskPart(task),)
    steps = ((_alone(task, step, first=step is task.steps[0]), step) for step in task.steps)
    return tuple(TaskPart(alone, step.name, step.min_reward, step is not task.steps[-1]) for alone, step in steps)


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
