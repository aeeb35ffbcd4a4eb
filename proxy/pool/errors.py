"""The errors of the pool. Every other exception that leaves the pool is a bug."""


class UserError(Exception):
    """Something the user asked for cannot be done: one sentence with the value, the rule and the way out."""


class PoolError(Exception):
    """The database did not do its part."""


class PoolReadError(PoolError):
    """The database did not answer a query (gone, unreadable)."""


class PoolWriteError(PoolError):
    """A transaction could not be written (disk full, database gone). Nothing of it was stored."""


class PoolConflict(PoolWriteError):
    """The database broke a transaction off in favour of another one; the pool's functions repeat it."""


class AttemptClosed(Exception):
    """The attempt of a completion has ended, so the completion is refused: its key no longer writes."""
