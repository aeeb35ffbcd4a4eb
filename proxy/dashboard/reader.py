"""What routes are, and how they read the pool: in a thread, never on the event loop."""

from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from aiohttp import web

T = TypeVar("T")


class RouteTable(Protocol):
    """Some of the dashboard's routes."""

    def add(self, router: web.UrlDispatcher) -> None: ...


class Read(Protocol):
    """Runs a function of the pool in a thread, and returns what it returns."""

    def __call__(self, work: Callable[..., T], *given: Any) -> Coroutine[Any, Any, T]: ...
