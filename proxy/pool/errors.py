"""The errors of the pool. Any other exception that leaves the pool is a bug."""

LONGEST = 20_000
"""Characters of a message. It may quote a log, or a value of a file that a stranger wrote."""


class UserError(Exception):
    """A request of the user cannot be met. The message is one sentence: the value, the rule, what to do."""

    def __init__(self, sentence: str):
        if len(sentence) > LONGEST:
            sentence = f"{sentence[: LONGEST // 2]} ... {sentence[-LONGEST // 2 :]}"
        super().__init__(printable(sentence))


class NotInPool(UserError):
    """The pool has no row of this id or name."""


def printable(text: str) -> str:
    """The text with control characters and the like written as escapes, so that a terminal obeys none of them."""
    if text.isprintable():
        return text
    return "".join(sign if sign in "\n\t" or sign.isprintable() else ascii(sign)[1:-1] for sign in text)


class PoolError(Exception):
    """The database failed."""


class PoolReadError(PoolError):
    """The database did not answer a query: it is gone or unreadable."""


class PoolWriteError(PoolError):
    """A transaction could not be written (disk full, database gone); nothing of it was stored."""


class PoolConflict(PoolWriteError):
    """The database aborted a transaction in favour of another one; the pool's functions repeat it."""


class AttemptClosed(Exception):
    """A completion was refused because its attempt has ended and its key is revoked."""
