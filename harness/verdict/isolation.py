"""Prepares the sandbox in which a verifier runs: the agent's own, or a fresh one with the agent's working directory.

Before the verifier starts, the agent's processes are ended (the task's own daemons go on), and files that steer a
verifier are as they were before the agent (harness/environment/protected_files.py lists them). The verifier runs as its
own user. Its home, temporary files and compiled Python get a random name after the agent's end, so the agent cannot
have put anything there. Its $PATH is the one from before the agent, without directories that the agent could write to.

What this does not stop: a process sandbox has one user, so only the order and the random names protect there. Where the
agent was root (profile harbor), the image's tools are restored, but not packages and libraries that the agent
installed; use `verifier.fresh` for such tasks. And a verifier that runs the agent's program runs the agent's program.
"""

import asyncio
import secrets
import shlex
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import msgspec

from harness.environment.file_manifest import MAX_FILES, FileDifference, remove, take_manifest, write_difference
from harness.environment.protected_files import RUNNERS_NAMES, above_tests, is_kept, is_tool, steering
from harness.environment.snapshot import Snapshot
from harness.failure import AttemptFailed
from harness.tasks import Task
from harness.verdict.verifier import LOGS
from sandboxes.base import Limits, OnOutput, Result, Sandbox, SandboxError, Sandboxes, User
from sandboxes.local.process import default_root, make_sandbox_directory
from sandboxes.local.process import remove as remove_directory

SECONDS = 120.0
GIT = {"safe.directory": "*", "core.hooksPath": "/dev/null", "core.fsmonitor": "false", "core.pager": "cat"}
"""Git settings of the verifier. The repository belongs to another user, which git refuses without safe.directory, and
its own configuration must not run the agent's programs."""
_PLACE = 'umask 077; mkdir "$HOME/$name" 2>/dev/null && cd "$HOME/$name" || { cd /tmp && mkdir "$name" && cd "$name"; }'


@dataclass(frozen=True)
class IsolationFindings:
    """What the agent did to the files, and what was done about it."""

    difference: FileDifference
    """Files that the agent added, changed or removed."""
    removed: list[str]
    """Steering files that the agent had added and that were removed."""
    restored: list[str]
    """Steering files whose content from before the agent was restored."""
    left: list[str]
    """Steering files that the agent changed and that could not be restored."""


@asynccontextmanager
async def verifier_sandbox(
    sandboxes: Sandboxes, sandbox: Sandbox, task: Task, snapshot: Snapshot, more: bool = False
) -> AsyncIterator[tuple["VerifierSandbox", IsolationFindings]]:
    """Give the sandbox in which the verifier may run, and what the agent had done to it.

    `more`: another step follows, so the verifier's files are removed at the end.
    """
    await end_agent(sandbox, task, snapshot)
    findings = await undo_steering(sandbox, task, snapshot)
    if not task.verifier.fresh:
        if task.verifier.network == "full" != snapshot.spec.network:
            await sandbox.allow_network()
        room = await _private(sandbox, task, snapshot)
        yield room, findings
        if more:
            await _withdraw(room, task)
        return
    fresh = await sandboxes.start(replace(snapshot.spec, network=task.verifier.network or snapshot.spec.network))
    try:
        carried = make_sandbox_directory(default_root())  # gc finds it after kill -9
        try:
            await sandbox.get(".", carried)
            await fresh.put(carried, ".")
        finally:
            await asyncio.to_thread(remove_directory, carried)
        yield await _private(fresh, task, snapshot), findings
    finally:
        await fresh.stop()


async def _withdraw(room: "VerifierSandbox", task: Task) -> None:
    """Remove what the next step's agent must not see: the verifier's files, its rewards and its home."""
    rewards = [LOGS] if task.verifier.rewards == "logs" else []
    paths = [*task.verifier.directories, *task.verifier.files, *rewards]
    own = " ".join(f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path) for path in paths)
    result = await room.run(f'rm -rf {own} "${{TMPDIR%/tmp}}"', Limits(seconds=SECONDS), {})
    if result.exit_code:
        raise SandboxError(f"the verifier's files cannot be removed for the next step: {result.output[-300:].strip()}")


async def end_agent(sandbox: Sandbox, task: Task, snapshot: Snapshot) -> None:
    """End the agent's processes.

    The command that ends them runs inside the sandbox, so tools that an agent with root rights has changed are restored
    first.
    """
    await _restore(sandbox, task, snapshot)
    await sandbox.end_processes()


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
    return IsolationFindings(
        difference, [path for path in planted if path not in stayed], tools + restored, sorted(left)
    )


def _steered_from_anywhere(task: Task, snapshot: Snapshot) -> bool:
    """Whether files anywhere can steer the verifier, not only those beside its own."""
    return not task.verifier.fresh and (snapshot.spec.profile == "harbor" or task.verifier.user == "root")


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
    if snapshot.spec.profile == "strict" or task.verifier.fresh or path in snapshot.changed:
        return False
    return is_tool(path) and not is_kept(task, path)


def _shadows(added: Iterable[str], task: Task, snapshot: Snapshot) -> set[str]:
    """Files that an agent with root rights has put into $PATH under the name of an existing command."""
    if snapshot.spec.profile == "strict" or task.verifier.fresh:
        return set()
    directories = snapshot.manifest.path.split(":")
    commands = {name for path in snapshot.manifest.files for at, _, name in [path.rpartition("/")] if at in directories}
    split = ((path, *path.rpartition("/")[::2]) for path in added)
    return {path for path, at, name in split if at in directories and name in commands and not is_kept(task, path)}


async def _private(sandbox: Sandbox, task: Task, snapshot: Snapshot) -> "VerifierSandbox":
    """Make the verifier's home and its environment variables."""
    user, name = task.verifier.user, f"verifier-{secrets.token_hex(8)}"
    command = f'name={name}; {_PLACE} && mkdir tmp pycache && pwd -P && echo "$(id -u):$(id -g)"'
    result = await sandbox.run(command, Limits(seconds=SECONDS), {}, user)
    if result.exit_code:
        raise SandboxError(f"no home can be made for the verifier: {result.output[-300:].strip()}")
    place, owner = result.output.strip().splitlines()[-2:]
    await _hand_over(sandbox, task, snapshot, owner)
    path, writable = snapshot.manifest.path, (sandbox.work, sandbox.home, *snapshot.manifest.temporary)
    env = {"PATH": safe_path(path, writable) if snapshot.spec.profile == "strict" else path}
    env |= {"HOME": sandbox.home if user == "root" else place, "TMPDIR": f"{place}/tmp"}
    env |= {"PYTHONPYCACHEPREFIX": f"{place}/pycache"}
    env |= {"GIT_CONFIG_COUNT": str(len(GIT))}
    for number, (key, value) in enumerate(GIT.items()):
        env |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return VerifierSandbox(sandbox, user, env)


async def _hand_over(sandbox: Sandbox, task: Task, snapshot: Snapshot, owner: str) -> None:
    """Remove what lies where the verifier's files belong. Where users are separated, give it the working directory.

    It becomes the owner, and the modes stay as the agent left them. Daemons of the task keep what they own and share it
    through the group.
    """
    places = [path for path in (*task.verifier.files, *task.verifier.directories) if not path.startswith(("~/", "/"))]
    work = shlex.quote(sandbox.work)
    commands = [f"rm -rf -- {' '.join(map(shlex.quote, places))}"] if places else []
    if snapshot.own_root and snapshot.spec.profile == "strict" and task.verifier.user == "verifier":
        share = [f"chgrp -hR {owner.partition(':')[2]} {work}", f"chmod -R g=u {work}"]
        commands += share if task.daemons else [f"chown -hR {owner} {work}"]
    if not commands:
        return
    result = await sandbox.run(" && ".join(commands), Limits(seconds=SECONDS), {"PATH": snapshot.manifest.path}, "root")
    if result.exit_code:
        raise SandboxError(f"the verifier cannot be given {sandbox.work}: {result.output[-300:].strip()}")


def write_findings(directory: Path, name: str, findings: IsolationFindings) -> None:
    """Write what the agent did: NAME.changes.json.gz, and NAME.steering.json when it touched what steers a verifier."""
    write_difference(directory / f"{name}.changes.json.gz", findings.difference)
    steering = {"removed": findings.removed, "restored": findings.restored, "left": findings.left}
    if any(steering.values()):
        (directory / f"{name}.steering.json").write_bytes(msgspec.json.encode(steering))


def safe_path(path: str, writable: tuple[str, ...]) -> str:
    """The absolute directories of a $PATH that are not inside `writable` places."""
    places = {PurePosixPath(place) for place in writable}
    absolute = [entry for entry in path.split(":") if entry.startswith("/")]
    return ":".join(entry for entry in absolute if not places & {(at := PurePosixPath(entry)), *at.parents})


def within(sandbox: Sandbox, path: str) -> str:
    """An absolute path in the form that the sandbox's methods take."""
    for base, prefix in ((sandbox.work, ""), (sandbox.home, "~/")):
        if path.startswith(f"{base}/"):
            return prefix + path[len(base) + 1 :]
    return path


class VerifierSandbox:
    """A sandbox in which commands and files are the verifier's. `~` is its home, not the agent's, unless it is root."""

    def __init__(self, sandbox: Sandbox, user: User, env: Mapping[str, str]):
        self._sandbox, self._user, self._env = sandbox, user, env
        self.id, self.work, self.home = sandbox.id, sandbox.work, env["HOME"]
        self.model_url, self.bundles, self.own_root = sandbox.model_url, sandbox.bundles, sandbox.own_root

    async def run(
        self,
        command: str,
        limits: Limits,
        env: Mapping[str, str],
        user: User | None = None,
        on_output: OnOutput | None = None,
    ) -> Result:
        return await self._sandbox.run(command, limits, {**self._env, **env}, user or self._user, on_output)

    async def write(self, path: str, content: str | bytes, user: User | None = None) -> None:
        await self._sandbox.write(self._own(path), content, user or self._user)

    async def read(self, path: str, limit: int = 1 << 20, user: User | None = None) -> bytes | None:
        return await self._sandbox.read(self._own(path), limit, user or self._user)

    async def put(self, source: Path, path: str, user: User | None = None) -> None:
        await self._sandbox.put(source, self._own(path), user or self._user)

    async def get(self, path: str, target: Path, user: User | None = None) -> None:
        await self._sandbox.get(self._own(path), target, user or self._user)

    async def keep_processes(self) -> None:
        await self._sandbox.keep_processes()

    async def allow_network(self) -> None:
        await self._sandbox.allow_network()

    async def end_processes(self) -> int:
        return await self._sandbox.end_processes()

    async def changed(self) -> Mapping[str, bool]:
        return await self._sandbox.changed()

    async def restore(self, paths: Sequence[str]) -> None:
        await self._sandbox.restore(paths)

    async def stop(self) -> None:
        await self._sandbox.stop()

    def _own(self, path: str) -> str:
        return within(self._sandbox, f"{self.home}/{path[2:]}") if path.startswith("~/") else path
