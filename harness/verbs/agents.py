"""`harness agents install`: agents from their registries."""

import argparse

from harness.agents import INSTALLED
from proxy.pool.errors import UserError


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    agents = verbs.add_parser("agents", help="install agents from their registries").add_subparsers(required=True)
    install = agents.add_parser("install", help="install the pinned versions")
    install.add_argument("names", nargs="+", metavar="NAME", help=f"of: {', '.join(INSTALLED)}")
    install.add_argument("--force", action="store_true", help="install again what is there")
    install.set_defaults(call=_install)


def _install(given: argparse.Namespace) -> int:
    unknown = [name for name in given.names if name not in INSTALLED]
    if unknown:
        raise UserError(f"the agent {unknown[0]!r} cannot be installed; choose from: {', '.join(INSTALLED)}")
    for name in given.names:
        agent = INSTALLED[name]
        if given.force or agent.package.installed_version() != agent.package.version:
            agent.install()
        print(f"{name} {agent.package.version}: {agent.package.binary()}")
    return 0
