"""Environment augmentation: seeded variations of a task's environment, applied when its set-up has ended.

A policy that has met one locale, one shell and one version of a library learns these by heart. What varies is declared
by the task or the run (harness/tasks/verdict_options.py: Augment); what is chosen for an attempt follows from the seed,
the task and the attempt alone (`chosen`), so a retry meets the same environment. A variation that an image does not
allow (a shell that it lacks) is skipped by its own test, and what was applied is recorded in the attempt's row. One
that changes packages or system files is never applied in a process sandbox, which has the machine's own.
`harness validate
--augment` proves that the oracle solution still passes under each single variation, not under their combinations.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from harness.environment.file_manifest import quoted
from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.tasks.verdict_options import Augment
from sandboxes.base import Sandbox

NOT_HERE = 3
"""Exit code of a variation's command where the environment does not allow it."""
SECONDS = 300.0
DEAD = "http://127.0.0.1:9"
"""Nothing listens on the discard port: it refuses at once."""
DEAD_MIRROR = f"""
mkdir -p ~/.config/pip && printf '[global]\\nindex-url = {DEAD}/simple\\nretries = 0\\n' >> ~/.config/pip/pip.conf
printf 'registry={DEAD}/\\nfetch-retries=0\\n' >> ~/.npmrc
for f in /etc/apt/sources.list /etc/apt/sources.list.d/*; do
    if [ -w "$f" ]; then sed -i 's#https\\{{0,1\\}}://[^/ ]*#{DEAD}#' "$f"; fi
done
"""
USUAL = Augment(
    shell=["/bin/sh", "/bin/bash", "/bin/dash"],
    locale=["C", "C.UTF-8", "POSIX", "en_US.UTF-8"],
    timezone=["UTC0", "EST5EDT", "JST-9", "IST-5:30"],
    user=["dev", "ubuntu", "runner"],
    mirror=True,
)
"""What `--augment` on the command line chooses its kinds from."""
Kind = Literal["shell", "locale", "timezone", "user", "mirror"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Variation:
    """One thing that is otherwise."""

    kind: str
    value: str
    command: str = ""
    """Run as the agent's user; exit code 3 says that the environment does not allow it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """For the agent, not for the verifier."""
    needs_own_root: bool = False
    """It changes packages or system files. Skip it in a process sandbox: there these are the machine's own."""

    @property
    def name(self) -> str:
        return f"{self.kind}={self.value}"


def variations(augment: Augment) -> list[list[Variation]]:
    """Everything that may be varied: of each inner list at most one is chosen."""
    found = [[_version(package, version) for version in augment.versions[package]] for package in augment.versions]
    found += [[_removal(name)] for name in augment.remove]
    found += [[Variation("mirror", "dead", DEAD_MIRROR, needs_own_root=True)]] if augment.mirror else []
    found += [[Variation("shell", path, f"[ -x {quoted(path)} ] || exit 3", {"SHELL": path}) for path in augment.shell]]
    found += [[Variation("locale", name, "", {"LANG": name, "LC_ALL": name}) for name in augment.locale]]
    found += [[Variation("timezone", name, "", {"TZ": name}) for name in augment.timezone]]
    found += [[Variation("user", name, "", {"USER": name, "LOGNAME": name}) for name in augment.user]]
    found += [[Variation("command", name, command)] for name, command in augment.commands.items()]
    return [choices for choices in found if choices]


def _version(package: str, version: str) -> Variation:
    install = f"python3 -m pip install --quiet --no-input --disable-pip-version-check {quoted(f'{package}=={version}')}"
    return Variation("version", f"{package}=={version}", install, needs_own_root=True)


def _removal(name: str) -> Variation:
    if name.startswith("/"):
        remove = f"[ -e {quoted(name)} ] || exit 3; rm -rf {quoted(name)}"
    else:
        remove = f"python3 -m pip show --quiet {quoted(name)} 2>/dev/null || exit 3"
        remove += f"; python3 -m pip uninstall --quiet --yes {quoted(name)}"
    return Variation("removed", name, remove, needs_own_root=True)


def chosen(augment: Augment, seed: int, task: str, attempt: str) -> list[Variation]:
    """What an attempt's environment has otherwise: a pure function of its arguments."""
    draws = random.Random(f"{seed}/{task}/{attempt}")
    found = []
    for choices in variations(augment):
        chance, choice = draws.random(), draws.choice(choices)  # both, so that one more variation shifts no other
        found += [choice] if chance < augment.probability else []
    return found


def of_run(kinds: Sequence[str]) -> Augment:
    """The usual variations of these kinds."""
    return Augment(
        shell=USUAL.shell if "shell" in kinds else [],
        locale=USUAL.locale if "locale" in kinds else [],
        timezone=USUAL.timezone if "timezone" in kinds else [],
        user=USUAL.user if "user" in kinds else [],
        mirror="mirror" in kinds,
    )


async def apply(sandbox: Sandbox, task: Task, wanted: Sequence[Variation]) -> tuple[list[str], dict[str, str]]:
    """Vary the environment: the names of what was applied, and the environment variables for the agent."""
    applied, env = [], dict[str, str]()
    for variation in wanted:
        if await _applied(sandbox, task, variation):
            applied.append(variation.name)
            env |= variation.env
    return applied, env


async def _applied(sandbox: Sandbox, task: Task, variation: Variation) -> bool:
    if variation.needs_own_root and not sandbox.own_root:
        return False
    if not variation.command:
        return True
    result = await sandbox.run(variation.command, task.command_limits(SECONDS), task.env)
    if result.ended == "exit" and result.exit_code in (0, NOT_HERE):
        return result.exit_code == 0
    how = f"exit code {result.exit_code}" if result.ended == "exit" else f"its {result.ended} limit"
    raise AttemptFailed(
        "sandbox_start", f"the variation {variation.name} ended by {how}: {result.output[-300:].strip()}"
    )


def every(augment: Augment | None) -> Iterator[Variation]:
    """Each variation that may be chosen."""
    for choices in variations(augment) if augment else ():
        yield from choices
