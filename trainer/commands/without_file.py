"""`trainer launch` without a settings file: what a proxy or the flags say becomes a file in the output directory.

The proxy's `/health` names its pool, model directory and engines. The file has the pool's URL, which may hold a
password, so only its owner can read it; arguments would show in `ps`. `trainer inspect` and the other verbs take it, so
what `--set` and its like say stands in it too.
"""

import argparse
import http.client
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from proxy.pool.errors import UserError
from proxy.pool.files import write_whole
from proxy.pool.settings_file import absolute, apply_override, checked, with_absolute_paths
from trainer.config import Config

RUN = "train"
"""Name of the run when `--run` gives none."""
FILE = "trainer.toml"
FIRST_LINE = "# Written by `trainer launch` without a file, which replaces it at every start."
SECONDS = 20
"""Time for the proxy's answer, which waits for its engines' health checks."""


class EngineReplica(msgspec.Struct):
    """One engine in the proxy's /health."""

    url: str


class ProxyDescription(msgspec.Struct):
    """What of the proxy's /health the trainer needs. Everything is absent for whoever lacks the admin key."""

    model_directory: str | None = None
    pool: str | None = None
    """Absent if it is a SQLite file and clients may be on other machines, or a URL that no admin key guards."""
    replicas: tuple[EngineReplica, ...] = ()


def add_options(launch: argparse.ArgumentParser) -> None:
    """Add the options that stand in for a settings file."""
    group = launch.add_argument_group("without a file")
    group.add_argument("--proxy", metavar="URL", help="take pool, model and engines from this running proxy")
    group.add_argument("--admin-key-file", type=Path, metavar="FILE", help="the proxy's admin key, if it has one")
    group.add_argument("--pool", metavar="URL", help="SQLite file or database URL (the proxy's)")
    group.add_argument("--model", metavar="DIR", help="initial weights, a Hugging Face directory (the proxy's)")
    group.add_argument("--engine", action="append", metavar="URL", help="push to this engine; repeatable (the proxy's)")
    group.add_argument("--output", metavar="DIR", help="checkpoints and exported models (runs/<run>-policy)")
    launch.add_argument("--run", metavar="NAME", help=f"the run to train on ({RUN}, or the file's)")


def settings_file(given: argparse.Namespace, overrides: Sequence[str]) -> Path:
    """The settings file that the command line names, or one written from its flags; UserError when neither works.

    Overrides are `section.key=value`. A written file has them too, so that a run that is resumed with it goes on with
    the same settings.
    """
    without = {name: value for name in ("proxy", "pool", "model", "engine", "output") if (value := vars(given)[name])}
    if given.config is not None:
        if without:
            raise UserError(
                f"the file {given.config} and --{next(iter(without))} both say what to train; use the file and "
                "--set, or only the flags"
            )
        return Path(given.config)
    proxy = ProxyDescription() if given.proxy is None else describe_proxy(given.proxy, given.admin_key_file)
    run, here = given.run or RUN, Path()
    settings: dict[str, Any] = {
        "pool": absolute(given.pool or proxy.pool, here),
        "run": run,
        "model": absolute(given.model or proxy.model_directory, here),
        "output": absolute(given.output or f"runs/{run}-policy", here),
        "push": {"engines": given.engine or [replica.url for replica in proxy.replicas]},
    }
    for key in ("pool", "model"):
        if not settings[key]:
            source = "neither a file nor --proxy is given" if given.proxy is None else f"{given.proxy} does not tell it"
            raise UserError(f"the {key} is unknown, as {source}; name it with --{key}")
    if not settings["push"]["engines"]:
        raise UserError("no engine is named, so nobody would get the new weights; give --engine URL, or --proxy URL")
    output = Path(settings["output"])
    for override in overrides:
        apply_override(settings, override)
    checked(with_absolute_paths(settings, Config, output), Config, "the command line")
    return _write(settings, output)


def describe_proxy(url: str, admin_key_file: Path | None) -> ProxyDescription:
    """Ask a running proxy for its pool, model directory and engines; UserError when it does not tell."""
    url = url.rstrip("/").removesuffix("/v1")
    headers = {}
    try:
        if admin_key_file is not None:
            headers["Authorization"] = f"Bearer {admin_key_file.read_text(encoding='ascii').strip()}"
        request = urllib.request.Request(f"{url}/health", headers=headers)
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            proxy = msgspec.json.decode(answer.read(), type=ProxyDescription)
    except (OSError, ValueError, http.client.HTTPException) as error:  # msgspec's errors are ValueErrors
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise UserError(
            f"the proxy {url} cannot be asked ({reason}); start `proxy serve`, or correct --proxy and --admin-key-file"
        ) from error
    if proxy.model_directory is None:
        raise UserError(f"the proxy {url} tells its model to its administrator only; give --admin-key-file FILE")
    return proxy


def _write(settings: dict[str, Any], output: Path) -> Path:
    """Write a file with these settings. Readable by its owner only: the pool's URL may hold a password."""
    sections = {key: value for key, value in settings.items() if isinstance(value, dict)}
    lines = [FIRST_LINE, *_lines({key: value for key, value in settings.items() if key not in sections})]
    for name, section in sections.items():
        lines += [f"[{name}]", *_lines(section)]
    try:
        output.mkdir(parents=True, exist_ok=True)
        write_whole(output / FILE, "\n".join([*lines, ""]).encode(), private=True)
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); name another with --output") from error
    return output / FILE


def _lines(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {_toml(value)}" for key, value in table.items()]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(_lines(value))}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return msgspec.json.encode(value).decode()  # JSON's text, numbers and booleans are TOML's
