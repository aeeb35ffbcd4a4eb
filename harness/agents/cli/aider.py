"""aider from PyPI: streamed chat completions without tools, through litellm. It edits files as the model's text says.

It commits each round of edits to the sandbox's git repository and asks the model for the commit message.
"""

import json
import shlex
from collections.abc import Sequence

from harness.agents.base import NO_MCP, Bundle, Endpoint, Launch
from harness.agents.bundles.install import PACKAGES, FromRegistry, Package, pip_install
from harness.tasks.schema import McpServer

OPTIONS = (
    "--yes-always --no-check-update --no-analytics --no-show-model-warnings --no-show-release-notes "
    "--no-gitignore --no-detect-urls --timeout 1200"  # calls wait during weight updates
)
MAIN = "import sys\n\nfrom aider.main import main\n\nsys.exit(main())\n"


class Aider(FromRegistry):
    """`aider` with one message and a yes to every question."""

    mcp = NO_MCP
    fixed = frozenset()  # it has no tools
    name = "aider"
    package = Package(name, "0.86.2", PACKAGES, "python")
    requirements = ("aider-chat==0.86.2",)

    def install(self) -> None:
        pip_install(self.package, self.requirements, MAIN)

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        binary, model = shlex.join(self.package.command(bundle)), shlex.quote(f"openai/{endpoint.model}")
        return Launch(
            command=f'exec {binary} --model {model} {OPTIONS} --message="$INSTRUCTION"',
            env={"OPENAI_API_BASE": endpoint.url, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            # without this description of the model it would download a list of models
            files={"~/.aider.model.metadata.json": json.dumps({f"openai/{endpoint.model}": _limits(endpoint)})},
        )


def _limits(endpoint: Endpoint) -> dict[str, object]:
    length = endpoint.context_length
    return {
        "max_tokens": length // 4,
        "max_input_tokens": length,
        "max_output_tokens": length // 4,
        "litellm_provider": "openai",
        "mode": "chat",
    }
