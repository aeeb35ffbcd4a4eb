"""kilo from npm, a relative of opencode: streamed chat completions. Its configuration names the proxy as a provider.

It asks the same model for a session title when its work is done, and leaves before the answer is there if that is slow.
Once it was seen not to exit at all, as in its maker's open report kilocode #9206; a limit of the task ended it.
"""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from harness.agents.base import STDIO_AND_HTTP, Bundle, Endpoint, Launch
from harness.agents.bundles.install import FromRegistry, Package, npm_install
from harness.agents.cli.opencode import config
from harness.tasks.schema import McpServer


class Kilo(FromRegistry):
    """`kilo run` with every permission."""

    mcp = STDIO_AND_HTTP
    name = "kilo"
    # of later versions the registry lacks the build for Linux; a script of Node.js starts the program
    package = Package(name, "7.7.7", Path("node_modules/.bin/kilo"), "node")

    def install(self) -> None:
        npm_install(self.package, "@kilocode/cli")

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        return Launch(
            command=f'exec {shlex.join(self.package.command(bundle))} run --auto -- "$INSTRUCTION"',
            env={
                "KILO_DISABLE_MODELS_FETCH": "1",
                "KILO_DISABLE_AUTOUPDATE": "1",
                "KILO_TELEMETRY_LEVEL": "off",
            },
            files={"~/.config/kilo/kilo.json": json.dumps(config(endpoint, "chat", servers))},
        )
