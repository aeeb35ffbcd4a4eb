"""The place in a sandbox where a verifier runs: a user, a home and an environment of its own.

Home, temporary files and compiled Python get a random name after the agent's end, so the agent cannot have put anything
there. $PATH is the one from before the agent, without directories that the agent could write to.
"""

import secrets
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO

from harness.environment.git_settings import git_variables
from harness.environment.snapshot import Snapshot
from harness.tasks import Task
from harness.verdict.verifier import user_of
from sandboxes.base import Limits, OnOutput, Result, Sandbox, SandboxError, User

SECONDS = 120.0
SAFE = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_ATTR_NOSYSTEM": "1", "GIT_TERMINAL_PROMPT": "0", "PIP_NO_INPUT": "1"}
"""Environment variables of the verifier. PYTHONSAFEPATH is not among them: it breaks `python3 -m unittest tests.x`."""
_HOME = (
    'umask 077; place=$home/$name; mkdir "$place" 2>/dev/null || { place=/tmp/$name; mkdir "$place"; }'
    ' && mkdir "$place/tmp" "$place/pycache"'
)
"""Makes the verifier's home in $home, or in /tmp where that is read-only, and leaves it in $place."""


async def verifier_room(
    sandbox: Sandbox, task: Task, snapshot: Snapshot, given: Sequence[str] = ()
) -> "VerifierSandbox":
    """Make the verifier's home and its environment variables, and hand it the working directory.

    `given`: further absolute paths that are handed over.
    """
    user, name = user_of(task.verifier), f"verifier-{secrets.token_hex(8)}"
    path, writable = snapshot.manifest.path, (sandbox.work, sandbox.home, *snapshot.manifest.temporary)
    env = {"PATH": safe_path(path, writable) if snapshot.spec.profile == "strict" else path}
    if task.verifier.environment is not None:  # no agent was there, and another image may keep its programs elsewhere
        env = {}

    async def written(command: str, by: User, lines: int) -> list[str]:
        """The last lines of a command's output. In the agent's own sandbox the shell may be the agent's."""
        result = await sandbox.run(command, Limits(seconds=SECONDS), env, by)
        last = result.output.strip().splitlines()[-lines:] if lines else []
        if result.exit_code or result.cut or len(last) < lines:
            lost = f"the verifier cannot be given a home and {sandbox.work}"
            raise SandboxError(f"{lost}: {result.output[-300:].strip()}")
        return last

    if (account := sandbox.account(user)) is not None:
        home, owner = account
        commands = [f"chown -R {owner} $place", *_handing_over(sandbox, task, snapshot, owner, given)]
        command = f"name={name} home={home}\n{_HOME} && {' && '.join(commands)} && cd $place && pwd -P"
        [place] = await written(command, "root", 1)
    else:  # nobody inside may do both
        command = f'name={name} home=$HOME\n{_HOME} && cd "$place" && pwd -P && echo "$(id -u):$(id -g)"'
        place, owner = await written(command, user, 2)
        if commands := _handing_over(sandbox, task, snapshot, owner, given):
            await written(" && ".join(commands), "root", 0)
    env |= {"HOME": sandbox.home if user == "root" else place, "TMPDIR": f"{place}/tmp"}
    env |= {"PYTHONPYCACHEPREFIX": f"{place}/pycache"} | SAFE | git_variables()
    return VerifierSandbox(sandbox, user, env)


def _handing_over(sandbox: Sandbox, task: Task, snapshot: Snapshot, owner: str, given: Sequence[str]) -> list[str]:
    """The commands of root that remove what lies where the verifier's files belong, and give it the working directory.

    Where users are separated, it becomes the owner, and the modes stay as the agent left them. Daemons of the task keep
    what they own and share it through the group.
    """
    places = [path for path in (*task.verifier.files, *task.verifier.directories) if not path.startswith(("~/", "/"))]
    work = shlex.quote(sandbox.work)
    commands = [f"rm -rf -- {' '.join(map(shlex.quote, places))}"] if places else []
    if snapshot.own_root and snapshot.spec.profile == "strict" and user_of(task.verifier) == "verifier":
        share = [f"chgrp -hR {owner.partition(':')[2]} {work}", f"chmod -R g=u {work}"]
        commands += share if task.daemons else [f"chown -hR {owner} {work}"]
        if given:
            commands += [f"chown -hR {owner} {' '.join(map(shlex.quote, given))}", f"chmod a+x {sandbox.home}"]
    return commands


def safe_path(path: str, writable: tuple[str, ...]) -> str:
    """The absolute directories of a $PATH that are not inside `writable` places."""
    places = {PurePosixPath(place) for place in writable}
    absolute = [entry for entry in path.split(":") if entry.startswith("/")]
    return ":".join(entry for entry in absolute if places.isdisjoint(_with_parents(entry)))


@lru_cache
def _with_parents(directory: str) -> frozenset[PurePosixPath]:
    """A directory and all above it. $PATH has the same ones in every attempt."""
    at = PurePosixPath(directory)
    return frozenset((at, *at.parents))


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

    def account(self, user: User) -> tuple[str, str] | None:
        return self._sandbox.account(user)

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

    async def alone(self) -> bool:
        return await self._sandbox.alone()

    async def end_processes(self) -> int:
        return await self._sandbox.end_processes()

    async def freeze(self) -> None:
        await self._sandbox.freeze()

    async def thaw(self) -> None:
        await self._sandbox.thaw()

    async def restart(self) -> None:
        await self._sandbox.restart()

    async def run_in_service(self, service: str, command: str, limits: Limits) -> Result:
        return await self._sandbox.run_in_service(service, command, limits)

    async def pack(self, path: str, archive: IO[bytes], limit: int, service: str = "") -> bool:
        return await self._sandbox.pack(path, archive, limit, service)

    async def changed(self) -> Mapping[str, bool]:
        return await self._sandbox.changed()

    async def restore(self, paths: Sequence[str]) -> None:
        await self._sandbox.restore(paths)

    async def stop(self) -> None:
        await self._sandbox.stop()

    def _own(self, path: str) -> str:
        return within(self._sandbox, f"{self.home}/{path[2:]}") if path.startswith("~/") else path
