"""qwen-code from npm: streamed chat completions, by environment variables and a settings file.

It compacts its history when that fills most of the context length.
"""

import json
import shlex
from pathlib import Path

from harness.agents.base import Bundle, Endpoint, Launch
from harness.agents.bundles.install import FromRegistry, Package, npm_install

PATIENCE_MS = 1_200_000  # calls wait during weight updates; its default is two minutes


class QwenCode(FromRegistry):
    """`qwen` with every permission."""

    name = "qwen-code"
    # later versions need Node.js 22 or newer
    package = Package(name, "0.15.10", Path("node_modules/.bin/qwen"), "node")

    def install(self) -> None:
        npm_install(self.package, "@qwen-code/qwen-code")

    def launch(self, endpoint: Endpoint, bundle: Bundle) -> Launch:
        binary = shlex.join(self.package.command(bundle))
        return Launch(
            command=f'exec {binary} --yolo --prompt="$INSTRUCTION"',
            env={"OPENAI_MODEL": endpoint.model},
            files={"~/.qwen/settings.json": json.dumps(_settings(endpoint))},
        )


def _settings(endpoint: Endpoint) -> dict[str, object]:
    generation = {"contextWindowSize": endpoint.context_length, "timeout": PATIENCE_MS}
    return {
        "security": {"auth": {"selectedType": "openai"}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
        "model": {"name": endpoint.model, "generationConfig": generation},
    }
