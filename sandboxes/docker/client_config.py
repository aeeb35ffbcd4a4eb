"""What the Docker command line has configured on this machine: its current context and its registry credentials.

Read by Docker's own SDK from $DOCKER_CONFIG, by default ~/.docker. The SDK takes up to a second to import, so it is
imported only where there is such a file. Left out: talking to the daemon, which aiodocker does.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from sandboxes.base import SandboxError


@dataclass(frozen=True, kw_only=True)
class DaemonEndpoint:
    """A daemon's address, with the files of its TLS certificates where the context has some."""

    address: str
    ca: str = ""
    certificate: str = ""
    key: str = ""


def config_directory() -> Path:
    """Return the directory of the Docker command line's configuration."""
    return Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")


def current_context() -> DaemonEndpoint | None:
    """Return the endpoint of the context in use; None for the default context. SandboxError when it cannot be read."""
    name = os.environ.get("DOCKER_CONTEXT", "")
    if not name and not (config_directory() / "config.json").exists():
        return None
    from docker.context import ContextAPI
    from docker.context.config import get_current_context_name

    name = name or get_current_context_name()
    if name == "default":
        return None
    try:
        context = ContextAPI.get_context(name)
    except Exception as error:  # the SDK raises a bare Exception for a damaged file
        raise SandboxError(f"the Docker context {name!r} cannot be read ({error}); see: docker context ls") from error
    if context is None or not context.Host:
        raise SandboxError(f"there is no Docker context {name!r}; choose one of: docker context ls, or set DOCKER_HOST")
    tls = context.TLSConfig
    if tls is None:
        return DaemonEndpoint(address=context.Host)
    certificate, key = tls.cert
    return DaemonEndpoint(address=context.Host, ca=tls.ca_cert, certificate=certificate, key=key)


def registry_credentials(image: str) -> tuple[str, dict[str, str]] | None:
    """Return an image's name with its registry, and the credentials for it; None where there are none.

    Runs the credential helper that is configured, if any. SandboxError when it fails.
    """
    if not (config_directory() / "config.json").exists():
        return None
    from docker import auth
    from docker.errors import DockerException

    try:
        registry, repository = auth.resolve_repository_name(image)
        entry = auth.load_config().resolve_authconfig(registry)
    except (DockerException, ValueError) as error:  # ValueError: an entry that is not base64
        raise SandboxError(f"the registry credentials for {image} cannot be read ({error})") from error
    # an entry of a file has lower-case keys, that of a helper has not; the daemon takes both, aiodocker only these
    given = {key.lower(): value for key, value in (entry or {}).items() if value}
    return (f"{registry}/{repository}", given) if given else None
