"""An agent for the survival test: a few model calls, each answer noted in $ACK_FILE as soon as it is here.

What stands in that file was acknowledged: the pool must hold it, whatever was killed. Standard library only.
"""

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
        with open(os.environ["ACK_FILE"], "a") as file:
            file.write(json.dumps({"key": os.environ["OPENAI_API_KEY"], "content": reply["content"]}) + "\n")
        messages += [reply, {"role": "user", "content": f"go on {turn}"}]


if __name__ == "__main__":
    main()
