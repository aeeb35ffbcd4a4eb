"""Environment augmentation: seeded variations of a task's environment, applied after its set-up.

A policy that only ever meets one locale, one shell and one version of a library learns these by heart. The task or the
run declares what may vary (harness/tasks/verdict_options.py: Augment). The choice follows from the seed, the task and
the attempt alone (`chosen`), so a retry meets the same environment. A variation that an image does not allow, such as a
shell that it lacks, is skipped by its own test. A variation that changes packages or system files is never applied in a
process sandbox, where these are the machine's own. The attempt's row records what was applied. `harness validate
--augment` proves that the oracle solution passes under each single variation, not under their combinations.
"""

import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.tasks.verdict_options import Augment
from sandboxes.base import Sandbox

NOT_HERE = 3
"""Exit code of a variation's command when the environment does not allow it."""
SECONDS = 300.0
DEAD = "http://127.0.0.1:9"
"""The discard port, where nothing listens, so that connections are refused at once."""
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
"""The variations behind the kinds of `--augment`."""
Kind = Literal["shell", "locale", "timezone", "user", "mirror"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Variation:
    """One change of the environment."""

    kind: str
    value: str
    command: str = ""
    """Run as the agent's user; exit code 3 says that the environment does not allow it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for the agent, not for the verifier."""
    needs_own_root: bool = False
    """It changes packages or system files. Skip it in a process sandbox: there these are the machine's own."""

    @property
    def name(self) -> str:
        return f"{self.kind}={self.value}"

    @property
    def changes_files(self) -> bool:
        """Whether its command changes files. The command of one with variables only asks whether they fit."""
        return bool(self.command) and not self.env


def variations(augment: Augment) -> list[list[Variation]]:
    """All variations that are declared; of each inner list at most one is chosen."""
    install = "python3 -m pip install --quiet --no-input --disable-pip-version-check"
    options = [
        [
            Variation("version", wanted, f"{install} {shlex.quote(wanted)}", needs_own_root=True)
            for wanted in (f"{package}=={version}" for version in versions)
        ]
        for package, versions in augment.versions.items()
    ]
    options += [[_removal(name)] for name in augment.remove]
    options += [[Variation("mirror", "dead", DEAD_MIRROR, needs_own_root=True)]] if augment.mirror else []
    options += [
        [Variation("shell", path, f"[ -x {shlex.quote(path)} ] || exit 3", {"SHELL": path}) for path in augment.shell]
    ]
    options += [[Variation("locale", name, "", {"LANG": name, "LC_ALL": name}) for name in augment.locale]]
    options += [[Variation("timezone", name, "", {"TZ": name}) for name in augment.timezone]]
    options += [[Variation("user", name, "", {"USER": name, "LOGNAME": name}) for name in augment.user]]
    options += [[Variation("command", name, command)] for name, command in augment.commands.items()]
    return [choices for choices in options if choices]


def _removal(name: str) -> Variation:
    if name.startswith("/"):
        remove = f"[ -e {shlex.quote(name)} ] || exit 3; rm -rf {shlex.quote(name)}"
    else:
        remove = f"python3 -m pip show --quiet {shlex.quote(name)} 2>/dev/null || exit 3"
        remove += f"; python3 -m pip uninstall --quiet --yes {shlex.quote(name)}"
    return Variation("removed", name, remove, needs_own_root=True)


def chosen(augment: Augment, seed: int, task: str, attempt: str) -> list[Variation]:
    """The variations of an attempt: a pure function of the arguments."""
    draws = random.Random(f"{seed}/{task}/{attempt}")
    selected = []
    for choices in variations(augment):
        chance, choice = draws.random(), draws.choice(choices)  # both, so that one more variation shifts no other
        selected += [choice] if chance < augment.probability else []
    return selected


def of_run(kinds: Sequence[str]) -> Augment:
    """The usual variations, limited to these kinds."""
    return Augment(
        shell=USUAL.shell if "shell" in kinds else [],
        locale=USUAL.locale if "locale" in kinds else [],
        timezone=USUAL.timezone if "timezone" in kinds else [],
        user=USUAL.user if "user" in kinds else [],
        mirror="mirror" in kinds,
    )


async def apply(sandbox: Sandbox, task: Task, selected: Sequence[Variation]) -> tuple[list[str], dict[str, str]]:
    """Apply variations to a sandbox.

    Returns the names of those that were applied, and environment variables for the agent.
    AttemptFailed("sandbox_start") when a variation's command fails.
    """
    applied, env = [], dict[str, str]()
    for variation in selected:
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
    """Every variation that may be chosen."""
    for choices in variations(augment) if augment else ():
        yield from choices
