"""Images: named, built once per content, prepared for users that own nothing; what cannot be had is told once."""

import asyncio
import base64
import json
import os
import re
import subprocess
import tarfile
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiodocker import DockerError
from aiodocker.containers import DockerContainer
from aiohttp import web

from sandboxes.base import Image, ImageError, SandboxError
from sandboxes.docker.backend import DockerSandboxes, Options
from sandboxes.docker.image.build_context import digest, files, pack, read_dockerfile
from sandboxes.docker.warm_pool import WarmPool
from sandboxes.host_files.walk import TreeError
from tests.sandboxes.docker.conftest import HARBOR, SMALL, says


@pytest.fixture
def told() -> list[str]:
    """What is said about the progress of images."""
    return []


@pytest.fixture
async def daemon(docker_daemon: str, told: list[str], tmp_path: Path) -> AsyncIterator[DockerSandboxes]:
    """A back end of its own. The images that it makes of the test's directory are removed again."""
    opened = await DockerSandboxes.open(Options(address=docker_daemon, progress=told.append))
    yield opened
    await opened.close()
    remove_images(tmp_path, "")


def remove_images(context: Path, repository: str) -> None:
    """Remove what was made of a directory: of one repository, or all of it."""
    ours = [repository, "--filter", f"label=blackforge.image={context}", "--format", "{{.Repository}}:{{.Tag}}"]
    ours = ours if repository else ours[1:]
    listed = subprocess.run(["docker", "image", "ls", *ours], check=True, capture_output=True, text=True).stdout.split()
    if tags := [tag for tag in listed if "<none>" not in tag]:  # an image may have lost its tag
        subprocess.run(["docker", "image", "rm", "--force", *tags], check=True, capture_output=True)


@pytest.fixture
def unique() -> str:
    """A text that no other test has, and no other run: images are named by their content, and runs share a daemon."""
    return f"unique {uuid.uuid4()}"


@pytest.fixture
def context(tmp_path: Path, unique: str) -> Path:
    """A directory with a Dockerfile, with content that no other test has."""
    (tmp_path / "Dockerfile").write_text(
        "FROM bb:1\nWORKDIR /app\nENV WHERE=image\nCOPY . .\n"
        "RUN echo built >made && chmod 600 made && mkdir -m 700 sub\n"
    )
    (tmp_path / "file").write_text(unique)
    return tmp_path


async def test_a_context_is_built_once_however_many_ask(
    daemon: DockerSandboxes, context: Path, told: list[str], unique: str
) -> None:
    spec = replace(SMALL, image=Image(context=context))
    started = await asyncio.gather(*(daemon.start(spec) for _ in range(3)))
    assert sum("Step 1/" in line for line in told) == 1
    assert [sandbox.work for sandbox in started] == ["/app"] * 3
    await asyncio.gather(*(sandbox.stop() for sandbox in started))

    (context / "file").write_text(f"other {unique}")
    sandbox = await daemon.start(spec)
    assert sum("Step 1/" in line for line in told) == 2
    assert await says(sandbox, "cat file; echo; echo $WHERE") == f"other {unique}\nimage"
    await sandbox.stop()


@pytest.mark.parametrize("repository", ["blackforge/strict", ""])
async def test_an_image_that_was_removed_while_nothing_ran_in_it_is_made_again(
    daemon: DockerSandboxes, context: Path, unique: str, repository: str
) -> None:
    specs = [replace(profile, image=Image(context=context)) for profile in (SMALL, HARBOR)]
    for spec in specs:
        await (await daemon.start(spec)).stop()
    for spec in specs:
        remove_images(context, repository)
        sandboxes = await asyncio.gather(*(daemon.start(spec) for _ in range(3)))
        assert [await says(sandbox, "cat file") for sandbox in sandboxes] == [unique] * 3
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))


async def test_a_spare_whose_image_was_removed_is_no_trouble(daemon: DockerSandboxes, context: Path) -> None:
    warm = WarmPool(daemon, 0)
    spec = replace(SMALL, image=Image(context=context))
    await (await warm.start(spec)).stop()
    remove_images(context, "")
    await (await warm.start(spec)).stop()


async def test_an_image_that_says_without_end_why_it_cannot_be_prepared_is_heard_in_part(
    daemon: DockerSandboxes, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (context / "mkdir").write_text("#!/bin/sh\nyes out of order | tr '\\n' ' ' | head -c 5000000\nexit 1\n")
    (context / "Dockerfile").write_text("FROM deb:py\nCOPY mkdir /usr/bin/mkdir\nRUN chmod 755 /usr/bin/mkdir\n")
    read: list[int] = []
    whole = DockerContainer._logs_list

    async def counted(self: DockerContainer, cm: Any) -> Sequence[str]:
        lines = await whole(self, cm)
        read.append(len("".join(lines)))
        return lines

    monkeypatch.setattr(DockerContainer, "_logs_list", counted)
    with pytest.raises(ImageError, match="cannot be prepared for profile strict (?s:.*)out of order"):
        await daemon.start(replace(SMALL, image=Image(context=context)))
    assert 0 < read[0] < 2 << 20


async def test_a_build_says_what_it_does_while_it_goes_on(daemon: DockerSandboxes, context: Path) -> None:
    with (context / "Dockerfile").open("a") as file:
        file.write("RUN sleep 3\n")
    starting = asyncio.create_task(daemon.start(replace(SMALL, image=Image(context=context))))
    seen = set()
    while not starting.done():
        seen.add(daemon.making)
        await asyncio.sleep(0.05)
    await (await starting).stop()
    going = re.compile(
        r"building the image of /.*: Step \d/\d : RUN sleep 3.*\(\d+% of its steps, (about \d+ s left, )?\d+ s\)$"
    )
    assert any(going.search(text) for text in seen), seen
    assert any("preparing image" in text for text in seen) and daemon.making == ""


async def test_the_working_directory_of_the_image_is_there_and_belongs_to_the_agent(
    daemon: DockerSandboxes, context: Path
) -> None:
    sandbox = await daemon.start(replace(SMALL, image=Image(context=context)))
    assert await says(sandbox, "cat made; echo more >>made; touch sub/x; whoami; stat -c %u made sub") == (
        "built\nagent\n10000\n10000"
    )
    await sandbox.stop()
    harbor = await daemon.start(replace(HARBOR, image=Image(context=context)))
    assert await says(harbor, "pwd; cat made; stat -c %u made") == "/app\nbuilt\n0"
    await harbor.stop()


async def test_a_directory_without_a_dockerfile_is_copied_into_the_named_image(
    daemon: DockerSandboxes, tmp_path: Path, unique: str
) -> None:
    (tmp_path / "hello.txt").write_text(unique)
    sandbox = await daemon.start(replace(SMALL, image=Image(name="bb:1", context=tmp_path), work="/here"))
    assert await says(sandbox, "pwd; ls -A; cat hello.txt") == f"/here\nhello.txt\n{unique}"
    await sandbox.stop()
    with pytest.raises(ImageError, match="has no Dockerfile and names no image"):
        await daemon.start(replace(SMALL, image=Image(context=tmp_path)))


async def test_a_build_that_fails_shows_the_end_of_its_log_and_is_not_tried_again(
    daemon: DockerSandboxes, context: Path, told: list[str]
) -> None:
    (context / "Dockerfile").write_text("FROM bb:1\nRUN echo the compiler is missing && exit 3\n")
    for _ in range(2):
        with pytest.raises(ImageError, match=r"cannot be built (.|\n)*code: 3(.|\n)*\n.*the compiler is missing"):
            await daemon.start(replace(SMALL, image=Image(context=context)))
    assert sum("Step 1/" in line for line in told) == 1


@pytest.mark.parametrize(
    ("image", "sentence"),
    [
        (None, "needs an image; name one in the task"),
        (Image(name="localhost:1/No/such:image"), "'localhost:1/No/such:image' is not on the daemon and cannot be had"),
        (Image(context=Path("/no/such/directory")), "cannot be read .No such file or directory.; name one"),
    ],
)
async def test_an_image_that_cannot_be_had_is_told_in_a_sentence(
    daemon: DockerSandboxes, image: Image | None, sentence: str
) -> None:
    with pytest.raises(ImageError, match=sentence):
        await daemon.start(replace(SMALL, image=image))


async def test_an_image_without_a_shell_is_told_so(daemon: DockerSandboxes, context: Path) -> None:
    (context / "Dockerfile").write_text("FROM scratch\nCOPY file /\n")
    with pytest.raises(ImageError, match="preparing .*/bin/sh"):
        await daemon.start(replace(SMALL, image=Image(context=context)))


def test_a_context_that_has_gone_is_not_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        digest(tmp_path / "gone", "Dockerfile")


def test_what_is_ignored_decides_neither_over_the_image_nor_over_its_name(tmp_path: Path) -> None:
    for name in ("keep", "a.log", "sub/b.log", "sub/c.txt", "node_modules/x/y", "docs/one.md", "docs/README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text(
        "# comment\n\n*.log\nnode_modules\ndocs/*.md\n!docs/README.md\n/sub/?.txt\n"
    )
    names = {name for name, path in files(tmp_path, "Dockerfile") if path.is_file()}
    assert names == {"keep", ".dockerignore", "sub/b.log", "docs/README.md"}

    before = digest(tmp_path, "Dockerfile")
    (tmp_path / "a.log").write_text("changed")
    assert digest(tmp_path, "Dockerfile") == before
    (tmp_path / "sub/b.log").chmod(0o755)
    assert digest(tmp_path, "Dockerfile") != before
    (tmp_path / ".dockerignore").write_text("**/*.log\nsub\n")
    assert {name for name, _ in files(tmp_path, "Dockerfile")} >= {"docs", "docs/one.md", "node_modules/x/y"}
    assert not {name for name, _ in files(tmp_path, "Dockerfile")} & {"a.log", "sub", "sub/b.log", "sub/c.txt"}


def test_a_name_that_is_no_utf_8_is_hashed_and_packed(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM bb:1\n")
    (tmp_path / "ä").write_text("x")
    (tmp_path / "link").symlink_to("ä")
    before = digest(tmp_path, "Dockerfile")
    assert before == "d0c23648c7eb35254556ec88556ad229d1293bf77c172499eb602b28102fe738"  # images are found by it
    odd = os.fsencode(tmp_path) + b"/\xff"
    Path(os.fsdecode(odd)).write_text("x")
    os.symlink(b"\xff", odd + b"-link")
    assert digest(tmp_path, "Dockerfile") != before
    with tempfile.TemporaryFile() as archive:
        pack(tmp_path, "Dockerfile", "", archive)
        with tarfile.open(fileobj=archive) as tar:
            assert {os.fsdecode(b"\xff"), os.fsdecode(b"\xff-link")} <= set(tar.getnames())


async def test_a_large_dockerfile_is_not_read(sandboxes: DockerSandboxes, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").touch()
    os.truncate(tmp_path / "Dockerfile", 2 << 20)
    with pytest.raises(TreeError, match="Dockerfile has more than 1 MiB"):
        read_dockerfile(tmp_path / "Dockerfile")
    with pytest.raises(ImageError, match="Dockerfile has more than 1 MiB"):
        await sandboxes.start(replace(SMALL, image=Image(context=tmp_path)))


@pytest.mark.parametrize(
    ("rules", "left"),
    [
        ("makefile\n", {"Makefile", "a.c", "deep/a.c", "deep/sub/keep", "deep/sub/x"}),
        ("*.[a-c]\n", {"Makefile", "deep/a.c", "deep/sub/keep", "deep/sub/x"}),
        ("*.[^d-z]\n", {"Makefile", "deep/a.c", "deep/sub/keep", "deep/sub/x"}),
        ("**/sub\n!deep/sub/keep\n", {"Makefile", "a.c", "deep/a.c", "deep/sub/keep"}),
        ("deep\n!**/keep\n", {"Makefile", "a.c", "deep/sub/keep"}),
        ("?\n", {"Makefile", "a.c", "deep/a.c", "deep/sub/keep", "deep/sub/x"}),
        ("de**x\na**.c\n**ke\n", {"Makefile", "deep/a.c", "deep/sub/keep"}),
        ("deep/**\n", {"Makefile", "a.c"}),
    ],
    ids=["case", "classes", "not a class", "exception below", "exception anywhere", "one letter", "glued", "below"],
)
def test_ignored_files_are_those_that_docker_ignores(tmp_path: Path, rules: str, left: set[str]) -> None:
    for name in ("Makefile", "a.c", "deep/a.c", "deep/sub/keep", "deep/sub/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / ".dockerignore").write_text(rules)
    assert {name for name, path in files(tmp_path, "Dockerfile") if path.is_file()} == left | {".dockerignore"}


def test_hostile_rules_and_contexts_end_in_bounded_time_and_one_sentence(tmp_path: Path) -> None:
    for name in ("a" * 255, "/".join("a" * 40)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".dockerignore").write_text("*a*a*a*a*a*a*a*b\n" + "**/a*a/" * 2000 + "\n" + "*a" * 2000 + "b\n")
    began = time.process_time()
    assert len(list(files(tmp_path, "Dockerfile"))) == 42
    assert time.process_time() - began < 10
    for rules, sentence in (
        ("a[", "'a[' is not a rule that can be read"),
        ("[b-a]", "is not a rule that can be read"),
        ("a\\", "is not a rule that can be read"),
        ("a**" * 5 + "b", "more than 4 wildcards"),
        ("a\n" * 1001, "more than 1000 rules"),
        ("a" * 65_537, "more than 65536 bytes"),
    ):
        (tmp_path / ".dockerignore").write_text(rules)
        with pytest.raises(TreeError) as raised:
            list(files(tmp_path, "Dockerfile"))
        assert sentence in str(raised.value)


async def test_a_context_with_a_link_to_this_machine_is_not_built(daemon: DockerSandboxes, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM bb:1\n")
    (tmp_path / "secret").symlink_to("/etc/passwd")
    with pytest.raises(ImageError, match="secret is a link that leads out of .* .to /etc/passwd.; replace it"):
        await daemon.start(replace(SMALL, image=Image(context=tmp_path)))
    (tmp_path / ".dockerignore").write_text("secret\n")
    assert [name for name, _ in files(tmp_path, "Dockerfile")] == [".dockerignore", "Dockerfile"]


class Registry:
    """A registry that answers as it is told, with an error of this status, code and message."""

    def __init__(self) -> None:
        self.status, self.code, self.message = 401, "UNAUTHORIZED", "authentication required"
        self.seen: list[str] = []
        """The credentials that each request came with."""
        self.address = ""

    async def answer(self, request: web.Request) -> web.Response:
        self.seen.append(request.headers.get("Authorization", ""))
        body = {"errors": [{"code": self.code, "message": self.message}]}
        headers = {"WWW-Authenticate": 'Basic realm="toy"'} if self.status == 401 else {}
        return web.json_response(body, status=self.status, headers=headers)

    def say(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message


@pytest.fixture
async def registry() -> AsyncIterator[Registry]:
    toy = Registry()
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", toy.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    toy.address = f"127.0.0.1:{runner.addresses[0][1]}"
    yield toy
    await runner.cleanup()


async def test_an_image_is_pulled_with_the_credentials_of_its_registry(
    daemon: DockerSandboxes, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    basic = base64.b64encode(b"me:secret").decode()
    (tmp_path / "config.json").write_text(json.dumps({"auths": {registry.address: {"auth": basic}}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(ImageError, match="is not on the daemon and cannot be had"):
        await daemon.start(replace(SMALL, image=Image(name=f"{registry.address}/team/image:1")))
    assert f"Basic {basic}" in registry.seen


async def test_a_registry_that_is_busy_is_asked_again_and_its_last_word_is_heard_once(
    daemon: DockerSandboxes, registry: Registry, context: Path
) -> None:
    name = f"{registry.address}/team/image:1"
    (context / "Dockerfile").write_text(f"FROM {name}\nCOPY file /\n")
    for spec in (replace(SMALL, image=Image(name=name)), replace(SMALL, image=Image(context=context))):
        for answer in ((429, "TOOMANYREQUESTS", "pull rate limit"), (502, "UNAVAILABLE", "bad gateway")):
            registry.say(*answer)
            with pytest.raises(SandboxError, match="the next start tries it again") as raised:
                await daemon.start(spec)
            assert type(raised.value) is SandboxError
        registry.say(404, "MANIFEST_UNKNOWN", "manifest unknown")
        for _ in range(2):
            with pytest.raises(ImageError, match="manifest unknown"):
                await daemon.start(spec)
            asked = len(registry.seen)
            registry.say(404, "NAME_UNKNOWN", "asked once more")
        assert len(registry.seen) == asked


@pytest.mark.parametrize(
    "words",
    [
        'exec: "/bin/sh": stat /bin/sh: no such file or directory: unknown',
        "crun: executable file `/bin/sh` not found: No such file or directory: OCI runtime error",
        "executable '/bin/sh' for container not found",
    ],
    ids=["runc", "crun", "youki"],
)
async def test_an_image_without_a_shell_is_told_for_good(
    daemon: DockerSandboxes, context: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """In the words of each runtime, of which this machine has the first."""

    async def refuse(self: DockerContainer) -> None:
        raise DockerError(400, words)

    monkeypatch.setattr(DockerContainer, "start", refuse)
    with pytest.raises(ImageError, match="/bin/sh"):
        await daemon.start(replace(SMALL, image=Image(context=context)))


async def test_a_daemon_that_fails_while_it_prepares_an_image_is_asked_again(
    daemon: DockerSandboxes, context: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = replace(SMALL, image=Image(context=context))

    async def busy(self: DockerContainer) -> None:
        raise DockerError(500, "context deadline exceeded")

    with monkeypatch.context() as failing:
        failing.setattr(DockerContainer, "start", busy)
        with pytest.raises(SandboxError, match="preparing .*: context deadline exceeded") as raised:
            await daemon.start(spec)
        assert type(raised.value) is SandboxError
    await (await daemon.start(spec)).stop()
