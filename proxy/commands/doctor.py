"""The command `proxy doctor`: what this machine has, what will be used, what is missing; 1 when a file cannot run."""

import argparse
import os
import re
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec

from proxy.config import ProxyConfig, load_config
from proxy.doctor.examine import Facts, Sandboxes, examine
from proxy.doctor.probe import EngineProbe
from proxy.engine.sglang import finds_gpu, on_cuda
from proxy.engine.toolkit import cuda_home
from proxy.http.auth import Access
from proxy.http.limits import LIMITS
from proxy.pool.database import demand_reachable
from proxy.pool.errors import UserError
from proxy.pool.machine.child import ask
from proxy.pool.machine.facts import read_machine
from proxy.pool.machine.report import write_report
from proxy.prompt.template import ChatTemplate
from proxy.server import handler_settings


def add_arguments(doctor: argparse.ArgumentParser) -> None:
    """Add the arguments of `proxy doctor`."""
    doctor.add_argument("config", type=Path, nargs="?", help="say whether this settings file can run here")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config) if arguments.config else None
    report = examine(read_facts(config), config)
    print(write_report(report, as_json=arguments.json))
    return report.status


def read_facts(config: ProxyConfig | None) -> Facts:
    """Read the machine and ask the libraries and the code that decides."""
    pool = Path(config.pool).parent if config and "://" not in config.pool else Path.cwd()
    return Facts(
        machine=read_machine([pool]),
        probe=msgspec.convert(ask("proxy.doctor.probe"), EngineProbe),
        sandboxes=msgspec.convert(ask("harness.setup.probe"), Sandboxes),
        cuda=on_cuda(config.engine.device if config else "auto"),
        gpu_found=finds_gpu(),
        toolkit=cuda_home(os.environ),
        wanted_torch=_wanted_torch(),
        config_errors=config_errors(config) if config else (),
    )


def _wanted_torch() -> str:
    """The torch that the installed SGLang pins; empty without SGLang, or where it pins none."""
    try:
        required = metadata.requires("sglang") or []
    except metadata.PackageNotFoundError:
        return ""
    return next((pin[1] for line in required if (pin := re.match(r"torch==([\d.]+)$", line))), "")


def config_errors(config: ProxyConfig) -> tuple[str, ...]:
    """Return why the pool cannot be used, and why `proxy serve` would not begin: it makes the same parts."""
    access = partial(Access, config.proxy, LIMITS.key_chars)
    checks: tuple[Callable[[], object], ...]
    checks = (partial(demand_reachable, config.pool), access, partial(_read_model, config))
    return tuple(error for check in checks if (error := _error_of(check)))


def _read_model(config: ProxyConfig) -> None:
    template = ChatTemplate(Path(config.engine.model), config.engine.tool_format)
    handler_settings(config, template, LIMITS)


def _error_of(check: Callable[[], object]) -> str:
    try:
        check()
    except UserError as error:
        return str(error)
    return ""
