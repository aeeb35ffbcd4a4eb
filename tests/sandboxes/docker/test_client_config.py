"""The configuration of the Docker command line: its context, its registry credentials, its credential helpers."""

import base64
import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from sandboxes.base import SandboxError
from sandboxes.docker.client_config import DaemonEndpoint, current_context, registry_credentials
from sandboxes.docker.daemon import DaemonError, DockerDaemon, usual_endpoint


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a configuration of the test's own, with nothing in it."""
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path


def write(config: Path, **content: Any) -> None:
    (config / "config.json").write_text(json.dumps(content))


def add_context(config: Path, name: str, host: str) -> str:
    """Write a context as `docker context create` does, and return its directory's name."""
    directory = hashlib.sha256(name.encode()).hexdigest()
    (config / "contexts/meta" / directory).mkdir(parents=True)
    meta = {"Name": name, "Metadata": {}, "Endpoints": {"docker": {"Host": host, "SkipTLSVerify": False}}}
    (config / "contexts/meta" / directory / "meta.json").write_text(json.dumps(meta))
    return directory


def test_the_context_in_use_names_the_daemon_and_docker_host_goes_before_it(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert current_context() is None
    write(config, currentContext="far")
    add_context(config, "far", "tcp://far:2375")
    add_context(config, "near", "unix:///near.sock")
    assert usual_endpoint() == DaemonEndpoint(address="tcp://far:2375")
    monkeypatch.setenv("DOCKER_CONTEXT", "near")
    assert usual_endpoint() == DaemonEndpoint(address="unix:///near.sock")
    monkeypatch.setenv("DOCKER_CONTEXT", "default")
    assert current_context() is None
    monkeypatch.setenv("DOCKER_HOST", "tcp://named:1")
    assert usual_endpoint() == DaemonEndpoint(address="tcp://named:1")


async def test_a_context_brings_its_certificates(config: Path) -> None:
    write(config, currentContext="safe")
    directory = config / "contexts/tls" / add_context(config, "safe", "tcp://127.0.0.1:1") / "docker"
    directory.mkdir(parents=True)
    for name in ("ca", "cert", "key"):
        (directory / f"{name}.pem").write_text("not a certificate")
    context = current_context()
    assert context is not None and (context.ca, context.key) == (f"{directory}/ca.pem", f"{directory}/key.pem")
    for address in ("", "tcp://127.0.0.1:1"):
        with pytest.raises(DaemonError, match=f"certificates for tcp://127.0.0.1:1 in {directory} cannot be used"):
            await DockerDaemon.open(address)


async def test_a_context_that_is_not_there_or_damaged_is_told_in_a_sentence(config: Path) -> None:
    write(config, currentContext="lost")
    with pytest.raises(DaemonError, match="there is no Docker context 'lost'; choose one"):
        await DockerDaemon.open()
    (config / "contexts/meta" / add_context(config, "lost", "x") / "meta.json").write_text("{")
    with pytest.raises(DaemonError, match="the Docker context 'lost' cannot be read"):
        await DockerDaemon.open()


def test_credentials_of_a_registry_are_found_by_the_name_of_the_image(config: Path) -> None:
    assert registry_credentials("registry.test/team/image:1") is None
    token = base64.b64encode(b"me:secret").decode()
    write(config, auths={"registry.test": {"auth": token}, "https://index.docker.io/v1/": {"auth": token}})
    name, credentials = registry_credentials("registry.test/team/image:1") or ("", {})
    assert name == "registry.test/team/image:1"
    assert (credentials["username"], credentials["password"]) == ("me", "secret")
    name, credentials = registry_credentials("team/image") or ("", {})
    assert (name, credentials["password"]) == ("docker.io/team/image", "secret")
    assert registry_credentials("other.test/image") is None


@pytest.mark.filterwarnings("ignore:docker-credential-missing not installed:UserWarning")
def test_a_credential_helper_is_asked_and_its_failure_is_told(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = config / "docker-credential-toy"
    helper.write_text('#!/bin/sh\ncat >/dev/null\necho \'{"Username": "<token>", "Secret": "abc"}\'\n')
    helper.chmod(helper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{config}:{os.environ['PATH']}")
    write(config, credHelpers={"registry.test": "toy", "other.test": "missing"})
    name, credentials = registry_credentials("registry.test/image") or ("", {})
    assert credentials == {"serveraddress": "registry.test", "identitytoken": "abc"}
    with pytest.raises(SandboxError, match="the registry credentials for other.test/image cannot be read .*missing"):
        registry_credentials("other.test/image")
