"""`harness agents install`: installs agents from their registries."""

import argparse

from harness.agents import INSTALLED
from harness.agents.bundles import runtime
from proxy.pool.errors import UserError
from proxy.pool.terminal.progress import progress


def add_to(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    agents = verbs.add_parser("agents", help="install agents from their registries").add_subparsers(required=True)
    install = agents.add_parser(
        "install", help="install the pinned versions", epilog="example: harness agents install opencode mini-swe-agent"
    )
    install.add_argument("names", nargs="+", metavar="NAME", help=f"any of: {', '.join(INSTALLED)}")
    install.add_argument("--force", action="store_true", help="install again, even if this version is there")
    install.set_defaults(call=_install)


def _install(given: argparse.Namespace) -> int:
    """Install the agents, and always the runtime, which every agent needs in containers."""
    bundles = {name: (agent.package, agent.install) for name, agent in INSTALLED.items()}
    bundles[runtime.PACKAGE.name] = (runtime.PACKAGE, runtime.install)
    unknown = [name for name in given.names if name not in bundles]
    if unknown:
        raise UserError(f"the agent {unknown[0]!r} cannot be installed; choose from: {', '.join(INSTALLED)}")
    for package, install in map(bundles.__getitem__, dict.fromkeys((runtime.PACKAGE.name, *given.names))):
        if given.force or package.installed_version() != package.version:
            with progress(f"installing {package.name} {package.version}"):
                install()
        print(f"{package.name} {package.version}: {package.directory}")
    return 0
