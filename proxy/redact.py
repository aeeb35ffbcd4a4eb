"""Keeps secrets out of the log, whatever is logged: messages and tracebacks alike.

Hidden are issued keys, keys in paths, queries and headers, and passwords in URLs. The last line of defence: nothing is
meant to log any of them. Left out: what agents and models say, which is not logged.
"""

import logging
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


class Formatter(logging.Formatter):
    """Writes records without the secrets in them."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def redacted(text: str) -> str:
    """The text with a *** for every secret that its form tells."""
    return SECRETS.sub(HIDDEN, text)
