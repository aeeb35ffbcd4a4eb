"""Keeps secrets out of the log, whatever is logged, messages and tracebacks alike, and out of what others tell us.

Hidden are issued keys, keys in paths, queries and headers, passwords in URLs, and the values of environment variables
whose names say that they are secret. In the log it is the last line of defence: nothing is meant to log any of them.
Left out: what agents and models say, which is not logged.
"""

import logging
import os
import re

HIDDEN = "***"
SECRETS = re.compile(
    r"""(?ix)
    (?: \b bf-[\w-]{8,}                                                     # an issued key
      | (?<=/r/) [^/\s'"]+ (?=/)                                            # in a path
      | (?<=[?&]key=) [^&\s'"]+                                             # in a query
      | (?<=\bbearer[ ]) [^\s'",\\]+
      | (?: (?<=x-api-key) | (?<=x-goog-api-key) ) ['"]? [:=,] \s* b?['"]? [^\s'",\\]+
      | (?<=://) [^\s/@'"]* : [^\s/@'"]* (?=@)                              # a user and a password
    )"""
)
SECRET_NAMES = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
SHORT = 8
"""Values of environment variables below this many characters are words rather than secrets."""


class RedactingFormatter(logging.Formatter):
    """Writes records without the secrets in them."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def redacted(text: str) -> str:
    """The text with a *** for every secret that its form or the environment tells."""
    for name, value in os.environ.items():
        if len(value) >= SHORT and SECRET_NAMES.search(name):
            text = text.replace(value, HIDDEN)
    return SECRETS.sub(HIDDEN, text)
