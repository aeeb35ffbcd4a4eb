"""The errors of the pool. Any other exception that leaves the pool is a bug."""


class UserError(Exception):
    """A request of the user cannot be met. The message is one sentence: the value, the rule, what to do."""


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
