"""Reads environment/docker-compose.yaml of a Harbor task: the part of Compose that such tasks need.

`main` is the sandbox. Every other service becomes a service of the task: it runs beside the sandbox, shares its network
(sandboxes/docker/services.py) and is reached by its name. These keys are read: build, image, command, environment,
depends_on, healthcheck, and named volumes of a single service (the service's own disk replaces them). Ports, restarts
and container names have no meaning here and are ignored. Any other key is refused by name, and so are variables of this
machine.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from harness.tasks.harbor_toml import Refused, refuse
from harness.tasks.schema import MAX_SERVICES, TaskImage, TaskService
from proxy.pool.errors import UserError
from proxy.pool.input_files import YAML_BYTES, parse_yaml, read_text, shortened

FILE = "environment/docker-compose.yaml"
MAIN = "main"
READ = {"build", "image", "command", "environment", "depends_on", "healthcheck", "volumes"}
PASSED_OVER = {"ports", "expose", "restart", "container_name", "init", "stdin_open", "tty", "pull_policy"}
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
SLEEPS = (["sh", "-c", "sleep infinity"], "sleep infinity", ["sleep", "infinity"])
"""Commands of `main` that only keep it alive; a sandbox stays alive anyway."""


@dataclass(frozen=True)
class Composed:
    """The content of a compose file."""

    image: TaskImage | None
    """Image of the sandbox; None when the file names none."""
    env: dict[str, str]
    services: tuple[TaskService, ...]


def read_compose(directory: Path) -> Composed:
    """Read the compose file of a task directory; an empty result when there is none. Refused for unknown keys."""
    if not (directory / FILE).exists():
        return Composed(None, {}, ())
    try:
        file = _Compose(directory)
        return Composed(file.main_image(), file.main_environment(), file.services())
    except (
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:  # a list where Compose has a table, and the like
        refuse(directory, FILE, f"has not the form of a compose file ({shortened(str(error))})")


class _Compose:
    """The file, checked."""

    def __init__(self, directory: Path):
        self._directory = directory
        try:
            content = parse_yaml(read_text(directory / FILE, YAML_BYTES), str(directory / FILE))
        except UserError as error:
            raise Refused(str(error)) from error
        for key in content if isinstance(content, dict) else ["its content"]:
            if key not in ("services", "volumes", "version", "name"):
                self._refuse(str(key))
        services = content.get("services") or {}
        self._services: dict[str, dict[str, Any]] = {str(name): body or {} for name, body in services.items()}
        if len(self._services) > MAX_SERVICES:
            self._refuse(f"more than {MAX_SERVICES} services")
        if MAIN not in self._services:
            self._refuse("without a service 'main'")
        for name, body in self._services.items():
            for key in sorted(body.keys() - READ - PASSED_OVER):
                self._refuse(f"services.{name}.{key}")
        self._check_main()
        self._check_volumes()

    def main_image(self) -> TaskImage | None:
        """The image of `main`, if the file names one."""
        body = self._services[MAIN]
        return self._image(MAIN, body) if "build" in body or "image" in body else None

    def main_environment(self) -> dict[str, str]:
        return self._environment(MAIN, self._services[MAIN])

    def services(self) -> tuple[TaskService, ...]:
        """The services beside `main`, each after those that it depends on."""
        return tuple(self._service(name, self._services[name]) for name in self._in_order() if name != MAIN)

    def _refuse(self, what: str) -> NoReturn:
        refuse(self._directory, f"{FILE}: {what}", "is not offered (docs/tasks.md says what is)")

    def _check_main(self) -> None:
        body = self._services[MAIN]
        if body.get("command", SLEEPS[0]) not in SLEEPS:
            self._refuse("services.main.command")
        for key in body.keys() & {"healthcheck", "volumes"}:
            self._refuse(f"services.main.{key}")

    def _check_volumes(self) -> None:
        users: dict[str, str] = {}
        for name, body in self._services.items():
            for volume in body.get("volumes") or []:
                source = volume.split(":")[0] if isinstance(volume, str) else ""
                if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", source) or users.setdefault(source, name) != name:
                    self._refuse(f"services.{name}.volumes ({volume})")

    def _in_order(self) -> Iterator[str]:
        done: list[str] = []
        while left := [name for name in self._services if name not in done]:
            ready = [name for name in left if set(self._needed(name)) <= set(done)]
            if not ready:
                self._refuse(f"depends_on in a circle or on nothing ({', '.join(left)})")
            done.append(ready[0])
            yield ready[0]

    def _needed(self, name: str) -> list[str]:
        needed = self._services[name].get("depends_on") or []
        for other, how in needed.items() if isinstance(needed, dict) else ():
            if (how or {}).get("condition", "service_started") == "service_completed_successfully":
                self._refuse(f"services.{name}.depends_on.{other}.condition = 'service_completed_successfully'")
        return list(needed)

    def _service(self, name: str, body: Mapping[str, Any]) -> TaskService:
        ready, seconds = self._health(name, body.get("healthcheck") or {})
        command = body.get("command") or ()
        return TaskService(
            name=name,
            image=self._image(name, body),
            command=tuple(shlex.split(command) if isinstance(command, str) else map(str, command)),
            env=self._environment(name, body),
            ready=ready,
            ready_timeout=seconds,
        )

    def _image(self, name: str, body: Mapping[str, Any]) -> TaskImage:
        build = body.get("build")
        if build is None:
            if not body.get("image"):
                self._refuse(f"services.{name} without build and image")
            return TaskImage(name=self._filled(str(body["image"]), f"services.{name}.image"))
        options = {"context": build} if isinstance(build, str) else dict(build)
        for key in sorted(options.keys() - {"context", "dockerfile"}):
            self._refuse(f"services.{name}.build.{key}")
        context = str(options.get("context", ".")).replace("${CONTEXT_DIR}", ".")
        directory = (self._directory / "environment" / self._filled(context, f"services.{name}.build")).resolve()
        if not directory.is_relative_to(self._directory):
            self._refuse(f"services.{name}.build outside of the task ({context})")
        return TaskImage(directory=str(directory), dockerfile=options.get("dockerfile", "Dockerfile"))

    def _environment(self, name: str, body: Mapping[str, Any]) -> dict[str, str]:
        entries = body.get("environment") or {}
        pairs = entries.items() if isinstance(entries, dict) else (str(item).partition("=")[::2] for item in entries)
        return {key: self._filled(_text(value), f"services.{name}.environment.{key}") for key, value in pairs}

    def _health(self, name: str, health: Mapping[str, Any]) -> tuple[str, float]:
        """The command that tests whether a service is ready, and the seconds that it may take."""
        test = health.get("test", "")
        if health.get("disable") or not test or test[0] == "NONE":
            return "", 60.0
        if isinstance(test, list):
            test = shlex.join(test[1:]) if test[0] == "CMD" else " ".join(test[1:])
        interval, start = (self._seconds(name, health.get(key, usual)) for key, usual in _USUAL.items())
        return self._filled(test, f"services.{name}.healthcheck"), start + int(health.get("retries", 3)) * interval + 30

    def _seconds(self, name: str, duration: object) -> float:
        parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", str(duration))
        if "".join(number + unit for number, unit in parts) != str(duration):
            self._refuse(f"services.{name}.healthcheck with a duration of {duration!r}")
        return sum(float(number) * UNITS[unit] for number, unit in parts)

    def _filled(self, value: str, where: str) -> str:
        """The value with each variable replaced by its default; `$$` is a dollar sign."""

        def default(match: re.Match[str]) -> str:
            if match[0] == "$$":
                return "$"
            if match[1] is None:
                self._refuse(f"{where} with a variable of this machine ({match[0]})")
            return match[1]

        return re.sub(r"\$\$|\$\{\w+:?-([^}]*)\}|\$\{?\w+\}?", default, value)


_USUAL = {"interval": "30s", "start_period": "0s"}


def _text(value: object) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
