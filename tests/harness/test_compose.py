"""Compose files of Harbor tasks: what becomes of them, and what is refused by name."""

from pathlib import Path

import pytest

from harness.tasks.harbor import load_harbor
from harness.tasks.harbor_toml import Refused
from harness.tasks.schema import TaskImage, TaskService
from tests.harness.test_harbor import task_directory

WHOLE = """
services:
  main:
    build: {context: "${CONTEXT_DIR}"}
    depends_on: {web: {condition: service_started}}
    environment: ["DATABASE=postgres://db/x", "DEBUG=${DEBUG:-off}"]
  web:
    build: {context: ./web, dockerfile: Dev}
    command: serve --port 80
    depends_on: [db]
    ports: ["80:80"]
  db:
    image: postgres:16
    environment: {POSTGRES_PASSWORD: pa$$word, FSYNC: false}
    volumes: ["data:/var/lib/postgresql"]
    healthcheck: {test: ["CMD", "pg_isready", "-U", "my user"], interval: 1s500ms, retries: 10, start_period: 2s}
volumes: {data: {}}
"""


def compose(path: Path, text: str) -> Path:
    return task_directory(path, **{"environment__docker-compose_dot_yaml": text, "environment__web__Dev": "FROM bb:1"})


def test_services_are_told_in_the_order_in_which_they_start(tmp_path: Path) -> None:
    task = load_harbor(compose(tmp_path, WHOLE))
    db = TaskService(
        name="db",
        image=TaskImage(name="postgres:16"),
        env={"POSTGRES_PASSWORD": "pa$word", "FSYNC": "false"},
        ready="pg_isready -U 'my user'",
        ready_timeout=47,
    )
    web = TaskService(
        name="web",
        image=TaskImage(directory=str(tmp_path / "environment/web"), dockerfile="Dev"),
        command=("serve", "--port", "80"),
    )
    assert task.services == (db, web)
    assert task.image == TaskImage(directory=str(tmp_path / "environment"))
    assert task.env == {"DATABASE": "postgres://db/x", "DEBUG": "off"}


def test_a_main_that_says_nothing_is_the_environment_itself(tmp_path: Path) -> None:
    task = load_harbor(compose(tmp_path, "services: {main: {}, cache: {image: 'redis:7'}}"))
    assert task.image == TaskImage(directory=str(tmp_path / "environment"))
    assert task.services == (TaskService(name="cache", image=TaskImage(name="redis:7")),)


@pytest.mark.parametrize(
    "text, what",
    [
        ("services: [", "cannot be read as YAML"),
        ("[]", "its content"),
        ("services: [main]", "has not the form of a compose file"),
        ("services: {main: {}, a: {image: x, command: '\"'}}", "has not the form of a compose file"),
        ("services: {web: {image: a}}", "without a service 'main'"),
        ("services: {main: {}}\nnetworks: {back: {}}", "networks"),
        ("services: {main: {privileged: true}}", "services.main.privileged"),
        ("services: {main: {command: nginx}}", "services.main.command"),
        ("services: {main: {volumes: ['.:/app']}}", "services.main.volumes"),
        ("services: {main: {}, a: {image: b, volumes: ['./data:/data']}}", "services.a.volumes (./data:/data)"),
        ("services: {main: {}, a: {image: x, volumes: ['d:/d']}, b: {image: x, volumes: ['d:/d']}}", "services.b.vol"),
        ("services: {main: {}, a: {}}", "services.a without build and image"),
        ("services: {main: {}, a: {build: {context: ., args: {A: b}}}}", "services.a.build.args"),
        ("services: {main: {}, a: {build: ../..}}", "services.a.build outside of the task"),
        ("services: {main: {}, a: {image: x, environment: {K: '${SECRET}'}}}", "services.a.environment.K with a var"),
        ("services: {main: {}, a: {image: x, depends_on: [b]}}", "depends_on in a circle or on nothing (a)"),
        (
            "services: {main: {}, a: {image: x, healthcheck: {test: 'true', interval: soon}}}",
            "services.a.healthcheck with a duration of 'soon'",
        ),
    ],
)
def test_what_is_not_offered_is_refused_by_name(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(Refused) as raised:
        load_harbor(compose(tmp_path, text))
    assert f"docker-compose.yaml: {what}" in str(raised.value) or f"docker-compose.yaml {what}" in str(raised.value)
