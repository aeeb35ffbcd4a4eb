"""mini-swe-agent from PyPI: chat completions with one bash tool, through litellm. OPENAI_BASE_URL is enough for it."""

import shlex
from collections.abc import Sequence

from harness.agents.base import NO_MCP, Bundle, Endpoint, Launch
from harness.agents.bundles.install import PACKAGES, FromRegistry, Package, pip_install
from harness.tasks.schema import McpServer

MAIN = "from minisweagent.run.mini import app\n\napp()\n"


class MiniSweAgent(FromRegistry):
    """`mini` in yolo mode, which ends when the model submits."""

    mcp = NO_MCP
    name = "mini-swe-agent"
    # without `mcp`, litellm fails to import and mini retries that as if the model were down
    package = Package(name, "2.4.6", PACKAGES, "python")
    requirements = ("mini-swe-agent==2.4.6", "litellm==1.106.2", "mcp")

    def install(self) -> None:
        pip_install(self.package, self.requirements, MAIN)

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        model = shlex.quote(f"openai/{endpoint.model}")
        binary = shlex.join(self.package.command(bundle))
        return Launch(
            command=f'exec {binary} -y --exit-immediately -m {model} -t "$INSTRUCTION" -o "$HOME/trajectory.json"',
            env={
                "MSWEA_CONFIGURED": "true",
                "MSWEA_COST_TRACKING": "ignore_errors",
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            },
        )
