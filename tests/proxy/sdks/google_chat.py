"""Run in google-genai's environment with the proxy's URL: a streamed chat with a function, in three calls.

Prints what its client makes of each answer, or its error, as JSON.
"""

import json
import sys

from google import genai
from google.genai import errors, types


def shell(command: str) -> str:
    """run a command"""
    return f"ran {command}"


client = genai.Client(api_key="agent", http_options=types.HttpOptions(base_url=sys.argv[1]))
config = types.GenerateContentConfig(tools=[shell], thinking_config=types.ThinkingConfig(include_thoughts=True))
chat = client.chats.create(model="tiny", config=config)
said: list[str] = []
try:
    for question in ("list", "and now?"):
        chunks = list(chat.send_message_stream(question))
        said.append("".join(part.text or "" for chunk in chunks for part in chunk.parts or () if not part.thought))
except errors.APIError as error:
    said.append(f"error {error.code}")
print(json.dumps(said))
