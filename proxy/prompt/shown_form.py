"""A prescribed form of the answer in the words of the prompt: where no grammar enforces a schema, the model reads it.

Where the request has tools, the model reads it in any case, and always in the same words: in one conversation, clients
require calls, leave the choice free and forbid them, and each prompt must go on from the one before.
The words stand at the end of the system prompt, or, where the template knows no system prompt, at the beginning of the
first user message. They are no part of the request's messages: which recorded turn a request continues is decided
without them. A turn that was sampled after other words is rendered as its text and begins a new branch.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from proxy.call import ANY_OBJECT, Call


def with_form(messages: Sequence[dict[str, Any]], call: Call, system: bool) -> Sequence[dict[str, Any]]:
    """The messages with the form that the call prescribes. `system`: the template shows a system prompt."""
    form = call.constraint
    if form is None or form.schema is None or (form.enforced and not call.tools):
        return messages
    words = _words(form.schema, bool(call.tools))
    role = "system" if system else "user"
    at = next((i for i, message in enumerate(messages) if message["role"] == role), None)
    if at is None or (system and at > 0):
        return [{"role": role, "content": words}, *messages]
    texts = [messages[at]["content"] or "", words] if system else [words, messages[at]["content"] or ""]
    content = "\n\n".join(filter(None, texts))
    return [*messages[:at], {**messages[at], "content": content}, *messages[at + 1 :]]


def _words(schema: Any, tools: bool) -> str:
    begin = "When you answer without calling a tool, answer" if tools else "Answer"
    if schema == ANY_OBJECT:
        return f"{begin} with one JSON object, and write nothing before or after it."
    text = msgspec.json.encode(schema).decode()
    return f"{begin} with JSON that fits this JSON schema, and write nothing before or after it:\n{text}"
