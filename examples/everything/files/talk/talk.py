"""A small agent of two turns that speaks Anthropic messages or Gemini. Standard library only.

It asks the model to do $INSTRUCTION, then to go on, and leaves what the model said in answer.txt.

usage: python3 talk.py messages|gemini
"""

import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

TURNS = ("", "Go on.")
"""What the user says; the first time the instruction."""
SECONDS = 1200
"""Calls wait while weights are updated."""


def messages(said: list[str], answered: list[Any]) -> tuple[Any, str]:
    """Call the model in Anthropic's dialect. Return its turn as it came, for the next call, and its text."""
    turns = [{"role": role, "content": content} for role, content in alternating("assistant", said, answered)]
    body = {"model": os.environ["MODEL"], "max_tokens": 4096, "messages": turns}
    content = call("/v1/messages", body)["content"]
    return content, "".join(block.get("text", "") for block in content)


def gemini(said: list[str], answered: list[Any]) -> tuple[Any, str]:
    """Call the model in Google's dialect. Return its turn as it came, for the next call, and its text."""
    turns = [
        {"role": role, "parts": [{"text": content}] if role == "user" else content}
        for role, content in alternating("model", said, answered)
    ]
    answer = call(f"/v1beta/models/{os.environ['MODEL']}:generateContent", {"contents": turns})
    parts = answer["candidates"][0]["content"].get("parts", [])
    return parts, "".join(part.get("text", "") for part in parts)


def alternating(model: str, said: list[str], answered: list[Any]) -> list[tuple[str, Any]]:
    turns: list[tuple[str, Any]] = []
    for number, text in enumerate(said):
        turns += [("user", text), *((model, answer) for answer in answered[number : number + 1])]
    return turns


def call(path: str, body: dict[str, Any]) -> dict[str, Any]:
    base = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    request = urllib.request.Request(base + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=SECONDS) as answer:
        return json.load(answer)


def main() -> None:
    speak = {"messages": messages, "gemini": gemini}[sys.argv[1]]
    said: list[str] = []
    answered: list[Any] = []
    texts: list[str] = []
    for turn in TURNS:
        said.append(turn or os.environ["INSTRUCTION"])
        answer, text = speak(said, answered)
        texts.append(text)
        Path("answer.txt").write_text("\n".join(texts))
        if not answer:  # an empty turn cannot be sent back
            break
        answered.append(answer)


if __name__ == "__main__":
    main()
