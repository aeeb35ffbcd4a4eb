"""Replaces the code of a finished solution by code that does no work, to see whether that earns the reward as well.

Each program or module that the solution wrote becomes one that writes a reward wherever a verifier of ours or Harbor's
looks for one, and ends with exit code 0. Data that the solution wrote stays. If the verdict is full all the same, then
tested code could buy it: it runs as a user who can write the reward, or its own exit code decides.
"""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath

from harness.environment.file_manifest import in_commands, take_manifest
from harness.environment.snapshot import Snapshot
from harness.tasks import Task
from sandboxes.base import Limits, Sandbox, SandboxError

MAX_FILES = 200
"""Programs that are replaced; a solution that writes more has copied a library."""
SECONDS = 60.0
SUFFIXES = (".py", ".sh", ".bash")
PLACES = "/logs/verifier/reward.txt /logs/verifier/reward.json"
PYTHON = f"""\
import os
for place in [os.environ.get("REWARD_FILE", ""), *"{PLACES}".split()]:
    try:
        open(place, "w").write("1")
    except OSError:
        pass
os._exit(0)
"""
SHELL = f"""\
#!/bin/sh
for place in $REWARD_FILE {PLACES}; do
    echo 1 2>/dev/null >$place
done
exit 0
"""
_PROGRAMS = 'for f do [ -f "$f" ] && [ ! -L "$f" ] && { [ -x "$f" ] && echo "x $f" || echo "- $f"; }; done; :'


async def hollow_out(sandbox: Sandbox, task: Task, snapshot: Snapshot) -> list[str]:
    """Replace the programs and modules that the solution wrote, but not its own; return their paths.

    SandboxError when one cannot be replaced.
    """
    difference = await take_manifest(sandbox, snapshot.spec, snapshot.own_root) - snapshot.manifest
    own = tuple(_places_of_solution(task, sandbox))
    changed = (path for path in (*difference.added, *difference.changed) if "\n" not in path)
    written = [path for path in changed if not path.startswith(own)][: 10 * MAX_FILES]
    programs = []
    for batch in in_commands(written):
        listed = await _run(sandbox, f"set -- {batch}\n{_PROGRAMS}", {})
        for line in listed.splitlines():
            executable, _, path = line.partition(" ")
            if path.endswith(SUFFIXES) or executable == "x":
                programs.append(path)
    for path in programs[:MAX_FILES]:
        text = PYTHON if path.endswith(".py") else SHELL
        await _run(sandbox, f"cat > {shlex.quote(path)} <<'END'\n{text}END", task.env)
    return programs[:MAX_FILES]


def _places_of_solution(task: Task, sandbox: Sandbox) -> Iterator[str]:
    """Absolute paths of the solution's own directories, with a slash. All of the working directory is none of them."""
    for path in task.solution.directories if task.solution else ():
        place = PurePosixPath(sandbox.home if path.startswith("~/") else sandbox.work, path.removeprefix("~/"))
        if not PurePosixPath(sandbox.work).is_relative_to(place):
            yield f"{place}/"


async def _run(sandbox: Sandbox, command: str, env: Mapping[str, str]) -> str:
    result = await sandbox.run(command, Limits(seconds=SECONDS), env)
    if result.exit_code or result.cut:  # a program that is left out would keep its verdict
        raise SandboxError(f"the solution's programs cannot be replaced: {result.output[-300:].strip()}")
    return result.output
