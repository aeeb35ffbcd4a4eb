"""An agent for the survival tests: a few model calls in one conversation. Standard library only."""

import json
import os
import urllib.request

TURNS = 3


def main() -> None:
    messages = [{"role": "user", "content": os.environ["INSTRUCTION"]}]
    for turn in range(TURNS):
        body = json.dumps({"model": os.environ["MODEL"], "messages": messages, "max_tokens": 8}).encode()
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            reply = json.load(answer)["choices"][0]["message"]
        messages += [reply, {"role": "user", "content": f"go on {turn}"}]


if __name__ == "__main__":
    main()
