"""Prepares the sandbox in which a verifier runs: a fresh one (fresh.py), or the one that the agent worked in.

In the agent's own, files that steer a verifier are put back to what they were before the agent
(harness/environment/protected_files.py lists them), and the agent's processes are ended from outside, unless services
or daemons of the task must stay: then a script inside ends the others.

What this does not stop in the agent's own sandbox: a process sandbox has one user, so only the order and random names
protect there. Where the agent was root (profile harbor), the image's tools are restored, but not packages and libraries
that the agent installed. Modules beside the verifier's files are imported before installed ones. And wherever it runs,
a verifier that runs the agent's program runs the agent's program.
"""

import shlex
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from harness.environment.file_manifest import MAX_FILES, remove, take_manifest
from harness.environment.protected_files import RUNNERS_NAMES, above_tests, is_kept, is_tool, steering
from harness.environment.snapshot import Snapshot
from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.verdict.findings import IsolationFindings
from harness.verdict.fresh import fresh_room
from harness.verdict.room import SECONDS, VerifierSandbox, verifier_room, within
from harness.verdict.verifier import LOGS
from sandboxes.base import Limits, Sandbox, SandboxError, Sandboxes


@asynccontextmanager
async def verifier_sandbox(
    sandboxes: Sandboxes,
    sandbox: Sandbox,
    task: Task,
    snapshot: Snapshot,
    *,
    before: Sequence[Task] = (),
    more: bool = False,
    ended: bool = False,
) -> AsyncIterator[tuple[VerifierSandbox, IsolationFindings]]:
    """Give the room in which the verifier may run, and what the agent had done to its sandbox.

    `before`: the tasks of the steps before this one. `more`: another step follows, so the verifier's files are removed
    at the end. `ended`: `end_agent` was called before.
    """
    if not ended:
        await end_agent(sandbox, task, snapshot)
    if snapshot.fresh:
        async with fresh_room(sandboxes, sandbox, task, snapshot, before, more) as fresh:
            yield fresh
        return
    findings = await undo_steering(sandbox, task, snapshot)
    if task.verifier.network == "full" != snapshot.spec.network:
        await sandbox.allow_network()
    room = await verifier_room(sandbox, task, snapshot)
    yield room, findings
    if more:
        await _withdraw(room, task)


async def _withdraw(room: "VerifierSandbox", task: Task) -> None:
    """Remove what the next step's agent must not see: the verifier's files, its rewards and its home."""
    rewards = [LOGS] if task.verifier.rewards == "logs" else []
    paths = [*task.verifier.directories, *task.verifier.files, *rewards]
    own = " ".join(f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path) for path in paths)
    result = await room.run(f'rm -rf {own} "${{TMPDIR%/tmp}}"', Limits(seconds=SECONDS), {})
    if result.exit_code:
        raise SandboxError(f"the verifier's files cannot be removed for the next step: {result.output[-300:].strip()}")


async def end_agent(sandbox: Sandbox, task: Task, snapshot: Snapshot) -> None:
    """End the agent's processes from outside: freeze a sandbox whose work is carried away, restart one that goes on.

    Tools that an agent with root rights has changed are restored while nothing runs. Where daemons or services of the
    task must stay, they are restored while the agent may still run, and a script inside ends its processes. Before
    all that, the commands run that collect artifacts; in services they run at the end, when no agent can reach them.
    """
    for one in (one for one in task.verifier.collect if not one.service):
        # Where it fails, the artifact is missing, which is for the verifier to judge.
        await sandbox.run(one.command, task.command_limits(one.timeout), task.env, "root")
    stays = not snapshot.fresh and (task.daemons or task.services)
    if not stays:
        await sandbox.freeze()
    if not snapshot.fresh:
        await _restore(sandbox, task, snapshot)
    if stays:
        await sandbox.end_processes()
    elif not snapshot.fresh:
        await sandbox.restart()
    for one in (one for one in task.verifier.collect if one.service):
        await sandbox.run_in_service(one.service, one.command, task.command_limits(one.timeout))


async def undo_steering(sandbox: Sandbox, task: Task, snapshot: Snapshot) -> IsolationFindings:
    """Compare the files with those before the agent, and undo what would steer the verifier."""
    above = above_tests(task, sandbox.work, snapshot.own_root)
    now = await take_manifest(sandbox, snapshot.spec, snapshot.own_root, above, RUNNERS_NAMES)
    if snapshot.manifest.whole and not now.whole and _steered_from_anywhere(task, snapshot):
        raise AttemptFailed(
            "verifier", f"the agent left more than {MAX_FILES} files, so what would steer the verifier is unknown"
        )
    difference = now - snapshot.manifest
    steer = steering(task, sandbox, snapshot.spec, snapshot.own_root)
    tools = [path for path in difference.changed if _may_be_undone(path, task, snapshot)]  # undone by end_agent
    shadows = _shadows(difference.added, task, snapshot)
    planted = [path for path in difference.added if steer(path) or path in shadows]
    touched = [path for path in (*difference.changed, *difference.removed) if steer(path)]
    restored = [path for path in touched if path in snapshot.originals]
    stayed = await remove(sandbox, planted, snapshot.manifest.path)
    for path in restored:
        await sandbox.write(within(sandbox, path), snapshot.originals[path])
    left = stayed | set(touched) - set(restored)
    held = snapshot.originals | dict(snapshot.work or {})
    altered = (*difference.changed, *difference.removed) if snapshot.work is not None else ()
    return IsolationFindings(
        difference,
        [path for path in planted if path not in stayed],
        tools + restored,
        sorted(left),
        originals={path: held[path] for path in altered if path in held},
    )


def _steered_from_anywhere(task: Task, snapshot: Snapshot) -> bool:
    """Whether files anywhere can steer the verifier, not only those beside its own."""
    return snapshot.spec.profile == "harbor" or task.verifier.user == "root"


async def _restore(sandbox: Sandbox, task: Task, snapshot: Snapshot) -> None:
    """Restore the image's tools that an agent with root rights has changed."""
    changed = [
        path
        for path, removed in (await sandbox.changed()).items()
        if (removed or not snapshot.manifest.files.get(path, "").startswith("d "))
        and _may_be_undone(path, task, snapshot)
    ]
    if changed:
        await sandbox.restore(changed)


def _may_be_undone(path: str, task: Task, snapshot: Snapshot) -> bool:
    """Whether this is a tool in a writable root that neither set-up changed nor the task lets the agent change."""
    if snapshot.spec.profile == "strict" or path in snapshot.changed:
        return False
    return is_tool(path) and not is_kept(task, path)


def _shadows(added: Iterable[str], task: Task, snapshot: Snapshot) -> set[str]:
    """Files that an agent with root rights has put into $PATH under the name of an existing command."""
    if snapshot.spec.profile == "strict":
        return set()
    directories = snapshot.manifest.path.split(":")
    commands = {name for path in snapshot.manifest.files for at, _, name in [path.rpartition("/")] if at in directories}
    split = ((path, *path.rpartition("/")[::2]) for path in added)
    return {path for path, at, name in split if at in directories and name in commands and not is_kept(task, path)}
