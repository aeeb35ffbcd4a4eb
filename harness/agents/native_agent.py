"""The project's own agent (harness/agents/native): chat completions, its context managed by tool calls or by rules.

Its bundle is a copy of the files here, so installing it needs no network. Its name tells who manages the context.
"""

import hashlib
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from harness.agents.base import STDIO_AND_HTTP, Bundle, Endpoint, Launch
from harness.agents.bundles.install import PACKAGES, FromRegistry, Package, compile_python
from harness.tasks.schema import McpServer

SOURCE = Path(__file__).with_name("native")
MAIN = "import sys\n\nfrom native.__main__ import main\n\nsys.exit(main())\n"
CONTEXT_POLICIES = ("free", "threshold", "hybrid", "none")
"""docs/agents.md says what each does."""


def _version() -> str:
    """A digest of the agent's files, so that a bundle of earlier ones is not taken for this one."""
    digest = hashlib.sha256()
    for path in sorted(SOURCE.glob("*.py")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


class Native(FromRegistry):
    """`native`, which lets the model manage its context, or `native-POLICY`."""

    mcp = STDIO_AND_HTTP
    package = Package("native", _version(), PACKAGES, "python")

    def __init__(self, policy: str = "free"):
        self.name = "native" if policy == "free" else f"native-{policy}"
        self._policy = policy

    def install(self) -> None:
        self.package.install(_fill)

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        binary = shlex.join(self.package.command(bundle))
        # the settings may name the policy where the agent's name does not
        servers_option = '--mcp "$MCP_FILE" ' if servers else ""
        policy = "" if self._policy == "free" else f"--policy {self._policy} "
        options = f"--context {endpoint.context_length} {policy}{servers_option}"
        return Launch(command=f'exec {binary} {options}-- "$INSTRUCTION"')


def _fill(directory: Path) -> None:
    packages = directory / PACKAGES
    shutil.copytree(SOURCE, packages / "native", ignore=shutil.ignore_patterns("__pycache__"))
    (packages / "__main__.py").write_text(MAIN)
    compile_python(packages)
