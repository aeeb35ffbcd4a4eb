"""An attempt that came to no verdict: the exception that carries its classified failure."""

from proxy.pool.rollouts.failures import FAILURES


class AttemptFailed(Exception):
    """An attempt came to no verdict."""

    def __init__(self, kind: str, detail: str):
        super().__init__(detail)
        self.kind = FAILURES[kind].kind
        self.detail = detail
