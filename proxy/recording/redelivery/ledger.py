"""The completions of one proxy that are committed and whose client may not have them yet."""


class DeliveryLedger:
    """Answers in transit. Not locked: use it from the event loop only.

    Its state is written to the pool about once a second; after a crash, other proxies treat what it lists as possibly
    undelivered (proxy/pool/processes/deliveries.py).
    """

    def __init__(self, proxy_id: int):
        self.proxy_id = proxy_id
        self._in_transit: set[int] = set()
        self._last = 0

    def committed(self, completion_id: int) -> None:
        """Note a new row; its answer has not been delivered yet."""
        self._in_transit.add(completion_id)
        self._last = max(self._last, completion_id)

    def settled(self, completion_id: int) -> None:
        """Forget an answer that was delivered, or that the pool lists as undelivered."""
        self._in_transit.discard(completion_id)

    def state(self) -> tuple[int, list[int]]:
        """The last committed completion (0 before the first) and those up to it that are still in transit."""
        return self._last, sorted(self._in_transit)
