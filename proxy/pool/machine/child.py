"""Asks a module in a process of its own. A library that crashes or hangs while it is imported is then one more fact."""

import json
import subprocess
import sys
from typing import Any

SECONDS = 300
"""Time for the answer. Importing torch and Megatron takes seconds, from a cold network disk minutes."""


def ask(module: str, *arguments: str) -> dict[str, Any]:
    """Run `python -m MODULE` and return the JSON object on its last line, or {"error": why there is none}."""
    try:
        answer = subprocess.run(
            [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"error": f"python -m {module} gave no answer within {SECONDS} s"}
    lines = answer.stdout.splitlines()
    if answer.returncode == 0 and lines:
        return dict(json.loads(lines[-1]))
    errors = answer.stderr.strip().splitlines()
    return {"error": errors[-1] if errors else f"python -m {module} ended with status {answer.returncode}"}
