"""Keeps secrets out of log messages, tracebacks and the error texts of other services.

It hides issued keys, keys in paths, queries and headers, passwords in URLs, and the values of environment variables
whose names say that they are secret. For the log it is the last line of defence: no code is meant to log any of them.
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
      | (?<=api-key) ['"]? [:=,] \s* b?['"]? [^\s'",\\]+
      | (?<=://) [^\s/@'"]* : [^\s/@'"]* (?=@)                              # a user and a password
    )"""
)
SECRET_NAMES = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
MIN_SECRET_CHARS = 8
"""Values of environment variables with fewer characters are taken for words, not secrets."""


class RedactingFormatter(logging.Formatter):
    """Formats log records without the secrets in them."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def redacted(text: str) -> str:
    """Replace each secret by ***: those of a known form, and those that the environment has."""
    for name, value in os.environ.items():
        if len(value) >= MIN_SECRET_CHARS and SECRET_NAMES.search(name):
            text = text.replace(value, HIDDEN)
    return SECRETS.sub(HIDDEN, text)
