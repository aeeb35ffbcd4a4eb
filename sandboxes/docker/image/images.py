"""Images on a daemon: pulls named ones that are missing, and builds others once per content.

For profile strict, an image is prepared once: a layer above it adds the two users and keeps a copy of the working
directory, to be copied into the writable mount that covers it. The task's own image is not changed. All built images
stay on the daemon as a cache, labelled blackforge.kind=image. Left out: BuildKit, which the API does not offer (1.41);
and base images that change under their name, since only the context is hashed.
"""

import asyncio
import hashlib
import logging
import re
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from sandboxes.base import Image, ImageError, SandboxError, Spec
from sandboxes.docker.client_config import registry_credentials
from sandboxes.docker.daemon import DaemonError, DockerDaemon, start_container
from sandboxes.docker.image.build import Build
from sandboxes.docker.image.build_context import digest, pack, read_dockerfile
from sandboxes.docker.image.remote_sources import forbidden_source
from sandboxes.docker.image.work import STEP, ImageWork, PulledLayers
from sandboxes.docker.isolation.reach import Router, own_addresses
from sandboxes.docker.labels import BOOT, HOST, IMAGE, KIND, PID, PREFIX, STARTED, labels_of, this_process
from sandboxes.docker.profiles import ACCOUNTS, AGENT, DEFAULT_WORK, BaseImage, working_directory
from sandboxes.host_files.walk import TreeError

REPOSITORY = "blackforge"
SEEDED = PREFIX + "seeded"
STASH = "/.blackforge/work"
PREPARE = rf"""
set -e
add() {{
    grep -q "^[^:]*:[^:]*:$2:" /etc/passwd 2>/dev/null || echo "$1:x:$2:$2::$3:/bin/sh" >>/etc/passwd
    grep -q "^[^:]*:[^:]*:$2:" /etc/group 2>/dev/null || echo "$1:x:$2:" >>/etc/group
}}
work=$1
shift
while [ $# -gt 0 ]; do
    add "$1" "$2" "$3"
    mkdir -p "$3"
    chmod 700 "$3" # what is mounted there takes this mode over
    shift 3
done
mkdir -p /tmp
chmod 1777 /tmp
mkdir -p "$work"
[ -n "$(ls -A "$work")" ] || exit 0
mkdir -p "{STASH}"
cp -a "$work/." "{STASH}/"
chown -R {AGENT}:{AGENT} "{STASH}"
exit 10
"""
"""Arguments: working directory, then name, uid and home of each user. Exit code 10: there is content to copy."""
PREPARE_LIMITS = {
    "NetworkMode": "none",
    "Memory": 4 << 30,
    "MemorySwap": 4 << 30,
    "PidsLimit": 64,
    "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m"}},
}
"""The image's own programs run while it is prepared."""
PREPARE_SECONDS = 1200.0
"""Time limit of a preparation, which copies the working directory."""
KEPT_LINES = 30
"""Lines of a build's log that an error message shows."""
BUILD_SECONDS = 3600.0
"""Time limit of a build. A task cannot tell how long compilers and package mirrors take."""
FINAL = re.compile(
    r"no such image|not found|(manifest|name) unknown|no matching manifest|does not exist|denied|forbidden|"
    r"unauthorized|no basic auth credentials|invalid reference|name invalid|HTTP (401|403|404) ",
    re.IGNORECASE,
)
"""What a registry or a daemon says that it will say again. Its status does not tell: Docker 20.10 passes all as 500."""
PULLS = re.compile(r"Step \d+/\d+ : FROM ", re.IGNORECASE)
"""The step of a build that pulls."""
NO_IMAGE = "no such image"
NO_SHELL = re.compile(r"/bin/sh\b.{0,40}(no such file|not found)", re.IGNORECASE)
"""What runc, crun and youki say where the image has none."""

log = logging.getLogger(__name__)


class Images:
    """The images of one daemon. Makes each at most once at a time, and again only after a failure that may pass."""

    def __init__(
        self,
        daemon: DockerDaemon,
        default: str,
        progress: Callable[[str], None] = log.info,
        router: Router | None = None,
    ):
        self._daemon, self._default, self._router = daemon, default, router
        self.work = ImageWork(progress)
        self._making: dict[str, asyncio.Task[Any]] = {}

    async def base(self, spec: Spec) -> BaseImage:
        """Return the image that a container of this spec starts from. ImageError when it cannot be pulled or built."""
        try:
            return await self._base(spec)
        except SandboxError as error:
            if not self.forget(error):
                raise
            return await self._base(spec)

    def forget(self, error: SandboxError) -> bool:
        """Return whether an image had gone, as after a prune. If so, what was made is looked for again, and made again.

        What failed for good stays known.
        """
        if isinstance(error, ImageError) or NO_IMAGE not in str(error).lower():
            return False
        self._making = {key: making for key, making in self._making.items() if not _made(making)}
        return True

    async def _base(self, spec: Spec) -> BaseImage:
        image = spec.image or Image(name=self._default)
        if image.context is not None:
            tag = await self._built(image, spec)
        elif image.name:
            tag = image.name
            await self._once(f"name {tag}", lambda: self._pull_if_missing(tag))
        else:
            raise ImageError("a Docker sandbox needs an image; name one in the task, or a default for the run")
        details = await self._inspect(tag)
        work = working_directory(spec, details["Config"].get("WorkingDir") or "")
        name = image.name or str(image.context)
        variables = frozenset(entry.partition("=")[0] for entry in details["Config"].get("Env") or ())
        if spec.profile == "harbor":
            return BaseImage(id=details["Id"], name=name, work=work, variables=variables)
        key = hashlib.sha256(f"{PREPARE} {details['Id']} {work}".encode()).hexdigest()[:24]
        prepared, seeded = await self._once(f"prepared {key}", lambda: self._prepared(details["Id"], name, work, key))
        return BaseImage(id=prepared, name=name, work=work, seeded=seeded, variables=variables)

    async def close(self) -> None:
        """Cancel pulls and builds."""
        for making in self._making.values():
            making.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)

    async def _once(self, key: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """Run `make` once for all callers with this key. It goes on when a caller is cancelled."""
        making = self._making.get(key)
        if making is None or (making.done() and (making.cancelled() or _may_pass(making.exception()))):
            making = self._making[key] = asyncio.ensure_future(make())
        return await asyncio.shield(making)

    async def _inspect(self, tag: str) -> dict[str, Any]:
        with self._daemon.translating_errors(f"image {tag}"):
            return await self._daemon.docker.images.inspect(tag)

    async def _details_if_there(self, tag: str) -> dict[str, Any] | None:
        """Return an image's details; None: the daemon does not have it."""
        try:
            return await self._inspect(tag)
        except DaemonError:
            raise
        except SandboxError as error:
            if not FINAL.search(str(error)):
                raise
            return None

    async def _pull_if_missing(self, name: str) -> None:
        if await self._details_if_there(name):
            return
        with self.work.on(f"pulling image {name}") as step:
            try:
                access = await asyncio.to_thread(registry_credentials, name)
            except SandboxError as error:  # as `docker pull` does: a public image needs none
                step(f"{error}; pulling without them")
                access = None
            pulled, auth = access or (name, None)
            try:
                layers = PulledLayers()
                with self._daemon.translating_errors("pulling"):
                    async for message in self._daemon.docker.images.pull(pulled, auth=auth, stream=True):
                        step(layers.after(message))
            except DaemonError:
                raise
            except SandboxError as error:
                if not FINAL.search(str(error)):
                    raise SandboxError(
                        f"the image {name!r} is not on the daemon and was not pulled ({error}); the next start tries "
                        "it again"
                    ) from error
                raise ImageError(
                    f"the image {name!r} is not on the daemon and cannot be had ({error}); build or load it, or "
                    "correct it"
                ) from error

    async def _built(self, image: Image, spec: Spec) -> str:
        context = image.context or Path()
        try:
            content = await asyncio.to_thread(digest, context, image.dockerfile)
        except OSError as error:
            raise ImageError(
                f"the build context {context} cannot be read ({error.strerror or error}); name one that is there"
            ) from error
        except TreeError as error:
            raise ImageError(str(error)) from error
        if not (context / image.dockerfile).is_file() and not image.name:
            raise ImageError(f"{context} has no {image.dockerfile} and names no image to copy its files into")
        work = spec.work or DEFAULT_WORK
        key = hashlib.sha256(f"{content} {image.name} {work}".encode()).hexdigest()[:24]
        tag = f"{REPOSITORY}/built:{key}"
        await self._once(tag, lambda: self._build(image, context, work, tag, spec))
        return tag

    async def _build(self, image: Image, context: Path, work: str, tag: str, spec: Spec) -> None:
        if await self._details_if_there(tag):
            return
        if not (context / image.dockerfile).is_file():
            await self._once(f"name {image.name}", lambda: self._pull_if_missing(image.name))
        lines: list[str] = []
        await self._check_sources(context / image.dockerfile)
        try:
            with tempfile.TemporaryFile() as archive:
                copying = f"FROM {image.name}\nWORKDIR {work}\nCOPY files/ ./\n"
                dockerfile = await asyncio.to_thread(pack, context, image.dockerfile, copying, archive)
                build = Build(archive, dockerfile, tag, {KIND: "image", IMAGE: str(context)}, spec)
                with self.work.on(f"building the image of {context}") as step:
                    async with asyncio.timeout(BUILD_SECONDS):
                        async for text in build.run(self._daemon, self._router):
                            _tell(step, text, lines)
        except DaemonError:
            raise
        except TimeoutError as error:
            raise ImageError(
                f"the image of {context} was not built in {BUILD_SECONDS:g} s; build it by hand"
            ) from error
        except (SandboxError, OSError) as error:
            if lines and PULLS.match(lines[-1]) and not FINAL.search(str(error)):
                raise SandboxError(
                    f"what the image of {context} is built on was not pulled ({error}); the next start tries it again"
                ) from error
            end = "\n".join(lines[-KEPT_LINES:])
            raise ImageError(f"the image of {context} cannot be built ({error}); its log ends:\n{end}") from error

    async def _check_sources(self, dockerfile: Path) -> None:
        """ImageError where a build would fetch what it must not reach."""
        if self._router is None or not dockerfile.is_file():
            return
        near = own_addresses() if self._daemon.local else []
        try:
            text = await asyncio.to_thread(read_dockerfile, dockerfile)
        except TreeError as error:
            raise ImageError(str(error)) from error
        if fault := await asyncio.to_thread(forbidden_source, text, near):
            raise ImageError(f"the image of {dockerfile.parent} is not built: {fault}")

    async def _prepared(self, image: str, name: str, work: str, key: str) -> tuple[str, bool]:
        """Return the image for profile strict above `image`, and whether it keeps a copy of the working directory."""
        tag = f"{REPOSITORY}/strict:{key}"
        details = await self._details_if_there(tag)
        if details is None:
            try:
                with self.work.on(f"preparing image {name} for profile strict"):
                    async with asyncio.timeout(PREPARE_SECONDS):
                        await self._prepare(image, name, work, key)
            except TimeoutError as error:
                raise ImageError(
                    f"the image {name!r} was not prepared in {PREPARE_SECONDS:g} s; make it smaller"
                ) from error
            details = await self._inspect(tag)
        return details["Id"], details["Config"]["Labels"].get(SEEDED) == "1"

    async def _prepare(self, image: str, name: str, work: str, key: str) -> None:
        users = [ACCOUNTS["strict"]["agent"], ACCOUNTS["strict"]["verifier"]]
        arguments = [part for user in users for part in (user.name, user.ids.split(":")[0], user.home)]
        config: dict[str, Any] = {
            "Image": image,
            "Entrypoint": ["/bin/sh", "-c", PREPARE, "sh", work, *arguments],
            "Cmd": [],
            "User": "0:0",
            "WorkingDir": "/",
            "Labels": labels_of("image", this_process()) | {IMAGE: name},
            "HostConfig": PREPARE_LIMITS,
        }
        try:
            with self._daemon.translating_errors(f"preparing {name}"):
                container = await self._daemon.docker.containers.create(config)
                try:
                    await start_container(container)
                    code = (await container.wait())["StatusCode"]
                    if code not in (0, 10):
                        log_text = "".join(await container.log(stdout=True, stderr=True, tail=20))[-500:].strip()
                        raise ImageError(
                            f"the image {name!r} cannot be prepared for profile strict (exit code {code}: {log_text}); "
                            "it needs /bin/sh, cp, chown, grep and mkdir"
                        )
                    unowned = " ".join(f'{label}=""' for label in (HOST, BOOT, PID, STARTED))
                    await container.commit(
                        repository=f"{REPOSITORY}/strict",
                        tag=key,
                        changes=[f"LABEL {SEEDED}={int(code == 10)} {unowned}"],
                    )
                finally:
                    await container.delete(force=True, v=True)
        except SandboxError as error:
            if not NO_SHELL.search(str(error)):
                raise
            raise ImageError(str(error)) from error


def _tell(step: Callable[[str], None], text: str, lines: list[str]) -> None:
    """Keep the last lines of a build's log, and say which step has begun."""
    for line in text.splitlines():
        if line.strip():
            lines.append(line.rstrip())
        if STEP.match(line):
            step(line.rstrip())
    del lines[:-KEPT_LINES]


def _made(making: "asyncio.Task[Any]") -> bool:
    """Return whether it has succeeded."""
    return making.done() and not making.cancelled() and making.exception() is None


def _may_pass(error: BaseException | None) -> bool:
    """Return whether another try may succeed after this error."""
    return error is not None and not isinstance(error, ImageError)
