"""The verifier of a Harbor task: its tests, where they run, and what reaches them there, by the rules of Harbor 0.25.

A verifier is `shared` (it runs in the agent's sandbox) unless it or the task says `separate`, or has an environment of
its own. Separate tests run in a fresh sandbox. Its image is `docker_image` of [verifier.environment], or built from
tests/Dockerfile; both hold the tests. Without them it is the task's image, and the tests are copied in. /logs/artifacts
and the declared artifacts reach it, services' too. Left out: services beside the tests (tests/docker-compose.yaml).
"""

import shlex
from collections.abc import Iterator
from pathlib import Path

from harness.tasks.harbor_toml import (
    MAIN,
    HarborArtifact,
    HarborEnvironment,
    HarborFile,
    HarborHealthcheck,
    HarborStep,
    HarborVerifier,
    refuse,
)
from harness.tasks.schema import Artifact, Collect, Directories, TaskImage, TaskLimits, Verifier, VerifierEnvironment
from proxy.pool.errors import UserError
from proxy.pool.input_files import shortened

LOGS = "mkdir -p /logs/agent /logs/verifier /logs/artifacts"
PUBLISHED = "/logs/artifacts"
"""What an agent leaves here is an artifact of every task."""
MAX_TRIES = 1_000_000
COMPOSE = "docker-compose.yaml"


def verifier_of(
    root: Path, directory: Path, judge: HarborVerifier, file: HarborFile, step: HarborStep | None
) -> Verifier:
    """Return the verifier of a task, or of a step, whose tests are laid over those that all steps share."""
    tests = [place / "tests" for place in dict.fromkeys((root, directory)) if (place / "tests").is_dir()]
    separate = _separate(judge, file.verifier, root)
    image = _image_of_tests(tests, judge, file, root) if separate else None
    if image is None and not any((place / "test.sh").is_file() for place in tests):
        raise UserError(f"{directory} has no tests/test.sh, so nothing would judge; write one")
    mounts: Directories = {"/tests" + "/" * number: str(place) for number, place in enumerate(tests)}
    own = judge.environment or file.verifier.environment
    around = own if separate and own else file.environment
    hooks = judge.collect if step is None else [*file.verifier.collect, *judge.collect]
    declared = judge.network_mode or around.network_mode
    return Verifier(
        command=f"{LOGS} && chmod +x /tests/test.sh && exec /tests/test.sh",
        directories={} if image else mounts,
        rewards="logs",
        timeout=judge.timeout_sec or 600,
        user="root",
        where="fresh" if separate else "shared",
        artifacts=list(_artifacts(file, step, root)) if separate else [],
        collect=[
            Collect(command=one.command, timeout=one.timeout_sec, service="" if one.service == MAIN else one.service)
            for one in hooks
        ],
        environment=_environment(around, image) if separate and (own or image) else None,
        network=None if declared == "no-network" else "full",
        env=judge.env,
    )


def _separate(judge: HarborVerifier, of_task: HarborVerifier, root: Path) -> bool:
    for table in (judge, of_task):
        if table.environment_mode == "shared" and table.environment is not None:
            raise UserError(
                f"{root / 'task.toml'}: a shared verifier has no environment of its own; remove one of the two"
            )
        if table.environment_mode or table.environment:
            return table.environment_mode != "shared"
    return False


def _image_of_tests(tests: list[Path], judge: HarborVerifier, file: HarborFile, root: Path) -> TaskImage | None:
    """The image that holds the tests; None when they are copied into the task's image."""
    for table, place in zip((judge, file.verifier), (tests[-1:], tests[:1]), strict=True):
        if table.environment and table.environment.docker_image:
            return TaskImage(name=table.environment.docker_image)
        for one in place:
            if (one / COMPOSE).exists():
                refuse(
                    root, f"{one.relative_to(root)}/{COMPOSE}", "is not offered: a separate verifier is one container"
                )
            if (one / "Dockerfile").is_file():
                return TaskImage(directory=str(one))
    return None


def _artifacts(file: HarborFile, step: HarborStep | None, root: Path) -> Iterator[Artifact]:
    declared = [*file.artifacts, *(step.artifacts if step else [])]
    entries = [HarborArtifact(source=one) if isinstance(one, str) else one for one in declared]
    if not any(one.source.rstrip("/") == PUBLISHED and one.service in (None, MAIN) for one in entries):
        yield Artifact(path=PUBLISHED)
    for one in entries:
        if one.service in (None, MAIN):
            yield Artifact(path=one.source, exclude=one.exclude)
        elif one.source.startswith("/"):
            yield Artifact(path=f"{one.service}:{one.source}", exclude=one.exclude)
        else:
            where = f"{root / 'task.toml'}: artifacts: {shortened(repr(one.source))} of the service {one.service!r}"
            raise UserError(f"{where} is no absolute path; begin it with /")


def _environment(around: HarborEnvironment, image: TaskImage | None) -> VerifierEnvironment:
    return VerifierEnvironment(
        image=image,
        work=around.workdir or "",
        env=around.env,
        limits=limits_of(around),
        setup="\n".join([LOGS, *until_healthy(around.healthcheck)]),
    )


def limits_of(environment: HarborEnvironment) -> TaskLimits:
    own = TaskLimits()
    return TaskLimits(
        cpus=environment.cpus,
        memory_mb=environment.memory_mb or own.memory_mb,
        disk_mb=environment.storage_mb or own.disk_mb,
    )


def until_healthy(health: HarborHealthcheck | None) -> list[str]:
    """Shell lines that repeat the command until it succeeds, and exit with 1 when all tries have failed."""
    if health is None:
        return []
    early = int(min(health.start_period_sec // health.start_interval_sec, MAX_TRIES))
    pause = f"if [ $tries -lt {early} ]; then sleep {health.start_interval_sec}; else sleep {health.interval_sec}; fi"
    command = f"timeout {health.timeout_sec} sh -c {shlex.quote(health.command)}"
    last = f"tries=$((tries + 1)); [ $tries -lt {early + health.retries} ] || exit 1"
    return [f"tries=0; until {command}; do {last}; {pause}; done"]


def patience(health: HarborHealthcheck | None) -> float:
    """Seconds for set-up: the longest time that all tries of the health check may take."""
    if health is None:
        return 120.0
    return 120.0 + health.start_period_sec + health.retries * (health.interval_sec + health.timeout_sec)
