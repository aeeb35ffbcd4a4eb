"""Replaces the code of a finished solution by code that does no work, to see whether that earns the reward as well.

Each program or module that the solution wrote becomes one that writes a reward wherever a verifier of ours or Harbor's
looks for one, and ends with exit code 0. Data that the solution wrote stays. If the verdict is full all the same, then
tested code could buy it: it runs as a user who can write the reward, or its own exit code decides.
"""

from harness.environment.file_manifest import quoted, take_manifest
from harness.environment.snapshot import Snapshot
from harness.tasks import Task
from sandboxes.base import Limits, Sandbox

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
_PROGRAMS = 'for f do [ -f "$f" ] && [ ! -L "$f" ] && { [ -x "$f" ] && echo "x $f" || echo "- $f"; }; done'


async def hollow_out(sandbox: Sandbox, task: Task, snapshot: Snapshot) -> list[str]:
    """Replace the programs and modules that the solution wrote, but not its own; return their paths."""
    difference = await take_manifest(sandbox, snapshot.spec, snapshot.own_root) - snapshot.manifest
    own = tuple(f"{path.rstrip('/')}/" for path in (task.solution.directories if task.solution else ()))
    changed = (path for path in (*difference.added, *difference.changed) if "\n" not in path)
    written = [path for path in changed if not path.startswith(own)][: 10 * MAX_FILES]
    if not written:
        return []
    command = f"set -- {' '.join(map(quoted, written))}\n{_PROGRAMS}"
    listed = await sandbox.run(command, Limits(seconds=SECONDS), {})
    programs = []
    for line in listed.output.splitlines():
        executable, _, path = line.partition(" ")
        if path.endswith(SUFFIXES) or executable == "x":
            programs.append(path)
    for path in programs[:MAX_FILES]:
        text = PYTHON if path.endswith(".py") else SHELL
        await sandbox.run(f"cat > {quoted(path)} <<'END'\n{text}END", Limits(seconds=SECONDS), task.env)
    return programs[:MAX_FILES]
