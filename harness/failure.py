"""An attempt that came to no verdict: the exception that carries its classified failure, and how it gets its class."""

from collections.abc import Iterator
from contextlib import contextmanager

from proxy.pool.errors import PoolError, UserError
from proxy.pool.rollouts.failures import FAILURES
from sandboxes.base import ImageError


class AttemptFailed(Exception):
    """An attempt came to no verdict. `kind` is one of proxy/pool/rollouts/failures.py."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = FAILURES[kind].kind
        self.detail = detail


class Unexpected(AttemptFailed):
    """An error that no code had classified; the stage in which it was raised gave it its kind."""


@contextmanager
def stage(kind: str) -> Iterator[None]:
    """Turn an error that nobody has classified into a failure of this kind.

    Errors that have a class of their own pass, and so does cancellation: AttemptFailed, ImageError (the task's image is
    at fault, whatever the stage), UserError and PoolError (they end the run).
    """
    try:
        yield
    except (AttemptFailed, ImageError, UserError, PoolError):
        raise
    except Exception as error:  # a failed rollout is a row, whatever broke
        raise Unexpected(kind, f"{type(error).__name__}: {error}") from error
