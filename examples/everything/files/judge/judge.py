"""Prints how much of what the model said is as the task wants it, from 0 to 1. The untrained model gets some of it.

It reads what the agent has left: answer.txt, mini-swe-agent's trajectory, codex's log of its session. Without any of
these it ends with an error, which is no verdict.

usage: python3 judge.py small|spaces|capitals
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

WANTED = {"small": str.islower, "spaces": str.isspace, "capitals": str.isupper}


def said() -> Iterator[str]:
    """Yield every answer of the model."""
    answer, mini, codex = (Path(name) for name in ("answer.txt", "said-mini.json", "said-codex.jsonl"))
    if answer.exists():
        yield answer.read_text()
    if mini.exists() and mini.stat().st_size:
        for message in json.loads(mini.read_text())["messages"]:
            if response := message.get("extra", {}).get("response"):
                yield response["choices"][0]["message"]["content"] or ""
    if codex.exists():
        for line in codex.read_text().splitlines():
            item = json.loads(line).get("payload", {})
            if item.get("type") == "message" and item.get("role") == "assistant":
                yield "".join(part.get("text", "") for part in item["content"])


def main() -> None:
    answers = list(said())
    if not answers:
        sys.exit("there is nothing that the model said")
    text = "".join(answers)
    print(sum(map(WANTED[sys.argv[1]], text)) / max(1, len(text)))


if __name__ == "__main__":
    main()
