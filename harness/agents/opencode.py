"""opencode from npm: streamed chat completions. A provider of its own in its configuration points it at the proxy.

Its session title is a second, tool-less conversation with the same model, recorded like every call.
"""

import json
import shlex
from pathlib import Path

from harness.agents.base import Endpoint, Launch
from harness.agents.install import Package, npm_install

PROVIDER = "blackforge"
PATIENT = {"timeout": False, "headerTimeout": False, "chunkTimeout": 1_200_000}  # calls wait out weight updates


class Opencode:
    """`opencode run` with every permission."""

    name = "opencode"
    package = Package(name, "1.18.33", Path("node_modules/.bin/opencode"))

    def check(self) -> None:
        self.package.binary()

    def install(self) -> None:
        npm_install(self.package, "opencode-ai")

    def launch(self, endpoint: Endpoint) -> Launch:
        return Launch(
            command=f'exec {shlex.quote(str(self.package.binary()))} run -- "$INSTRUCTION"',
            env={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
            files={"~/.config/opencode/opencode.json": json.dumps(_config(endpoint))},
        )


def _config(endpoint: Endpoint) -> dict[str, object]:
    model = f"{PROVIDER}/{endpoint.model}"
    # opencode compacts its history when less than `output` is left of `context`
    limit = {"context": endpoint.context_length, "output": min(32_000, endpoint.context_length // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": endpoint.url, "apiKey": "{env:OPENAI_API_KEY}"} | PATIENT,
        "models": {endpoint.model: {"name": endpoint.model, "tool_call": True, "limit": limit}},
    }
    return {"provider": {PROVIDER: provider}, "model": model, "small_model": model, "permission": "allow"}
