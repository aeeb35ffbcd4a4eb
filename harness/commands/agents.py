"""`harness agents install`: installs agents from their registries, and the runtime that they need in containers."""

import argparse
from collections.abc import Callable, Sequence

from harness.agents import INSTALLED
from harness.agents.bundles import runtime
from harness.agents.bundles.install import Package
from proxy.pool.errors import UserError
from proxy.pool.terminal.progress import progress

NAMES = (*INSTALLED, runtime.PACKAGE.name)


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    agents = verbs.add_parser("agents", help="install agents from their registries").add_subparsers(required=True)
    install = agents.add_parser(
        "install", help="install the pinned versions", epilog="example: harness agents install opencode mini-swe-agent"
    )
    install.add_argument("names", nargs="+", metavar="NAME", help=f"any of: {', '.join(NAMES)}")
    install.add_argument("--force", action="store_true", help="install again, even if this version is there")
    install.set_defaults(call=_install)


def _install(given: argparse.Namespace) -> int:
    for package, install in bundles_of(given.names):
        if given.force or package.installed_version() != package.version:
            with progress(f"installing {package.name} {package.version}"):
                install()
        print(f"{package.name} {package.version}: {package.directory}")
    return 0


def bundles_of(names: Sequence[str]) -> list[tuple[Package, Callable[[], None]]]:
    """Return what to install for these agents, each bundle with what installs it. UserError for an unknown name.

    The runtime is always the first: every agent needs it in containers. Agents may share a bundle, as those of one
    program do that differ in the dialect.
    """
    bundles: dict[str, tuple[Package, Callable[[], None]]] = {
        runtime.PACKAGE.name: (runtime.PACKAGE, runtime.install),
    }
    for name in names:
        if name not in NAMES:
            raise UserError(f"the agent {name!r} cannot be installed; choose from: {', '.join(NAMES)}")
        if agent := INSTALLED.get(name):
            bundles.setdefault(agent.package.name, (agent.package, agent.install))
    return list(bundles.values())
