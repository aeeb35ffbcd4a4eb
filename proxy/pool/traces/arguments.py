"""Arguments of tool calls as values. Rows and templates have them as JSON text, and a model may write any text."""

from typing import Any

import msgspec


def decoded_arguments(text: str) -> Any:
    """Return the JSON value of arguments; the text itself where it is no JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return text
