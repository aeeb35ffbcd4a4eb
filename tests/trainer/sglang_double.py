"""An SGLang server without a model, to test the order of a push's requests and failures in the middle of it.

It keeps what a push can see of the real one: versions, the pause, sessions of partial updates, tensors, memory that is
released by tags; it joins groups and receives broadcasts over gloo; and it dies where the real one does. Left out:
sampling (tests/trainer/test_engine.py).
"""

import asyncio
import math
import pickle
from base64 import b64decode
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass
class Double:
    """One server, and the requests that it received."""

    about: dict[str, Any] = field(default_factory=lambda: {"tp_size": 1, "pp_size": 1, "dp_size": 1, "device": "cpu"})
    version: str = "initial"
    checksum: str = "equal"
    """The checksum that it reports, whatever its weights are."""
    calls: list[str] = field(default_factory=list)
    """Paths of requests without the slash, with their tags if they have any; without requests that only read."""
    faults: dict[str, str | int] = field(default_factory=dict)
    """By path: an HTTP status, `hang`, or `lie` (success without doing it). Each happens until it is taken out."""
    obeyed: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    """By path: what happens elsewhere after it has obeyed, once."""
    paused: bool = False
    busy: int = 0
    """What it has to finish before it can flush its caches. It finishes one thing each time that it goes on; with
    pipeline ranks, one each time that it is asked to flush while it is held."""
    in_session: bool = False
    released: set[str] = field(default_factory=set)
    dead: bool = False
    """Whether it died, as SGLang does when told to take back memory that it has not freed."""
    patience: int | None = None
    """Number of requests that it still performs; it refuses the others, as if the trainer had died before them."""
    buckets: list[dict[str, Any]] = field(default_factory=list)
    """The tensors of each request, for rank 0."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    group: Any = None
    """The group with a trainer, as rank 1 of two."""
    group_seconds: int = 60
    """How long it waits for a trainer in a group. It cannot end before, as a blocked broadcast cannot be cancelled."""

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path.strip("/")
        body = await request.json() if request.can_read_body else {}
        if path not in ("server_info", "model_info", "weights_checker", "update_weight_version"):
            self.calls.append(" ".join([path, *body.get("tags", [])]))
        self.bodies.append(body)
        fault = self.faults.get(path)
        if self.patience is not None:
            self.patience -= 1
            fault = 503 if self.patience < 0 else fault
        if fault == "hang":
            await asyncio.Event().wait()
        if isinstance(fault, int) or self.dead:
            return web.json_response({"error": {"message": "as told"}}, status=fault if isinstance(fault, int) else 500)
        if path == "init_weights_update_group":
            self.group = await asyncio.to_thread(join, body, self.group_seconds)
        if path == "update_weights_from_distributed":
            self.buckets.append(await asyncio.to_thread(receive, self.group, body))
        if fault != "lie" and (refusal := self._do(path, body)):
            return web.json_response({"success": False, "message": refusal}, status=400)
        if then := self.obeyed.pop(path, None):
            await then()
        ranks = [{"per_gpu_checksum": self.checksum}] if self.checksum else []
        return web.json_response({"success": True, "weight_version": self.version, "ranks": ranks, **self.about})

    def _do(self, path: str, body: dict[str, Any]) -> str:
        """Perform a request, or return why it fails."""
        tags = set(body.get("tags", []))
        if path in ("pause_generation", "continue_generation"):
            self.paused = path == "pause_generation"
            self.dead = not self.paused and bool(self.released)
        if path == ("continue_generation" if self.about["pp_size"] == 1 else "flush_cache") and self.busy:
            self.busy -= 1
            return "" if path == "continue_generation" else "Timed out waiting for idle state."
        if self.busy and (path == "flush_cache" or path.startswith("update_weights_from")):
            return "the cache was not flushed"
        if path in ("begin_weight_update", "end_weight_update"):
            if self.in_session == (path == "begin_weight_update"):
                return "a session is open" if self.in_session else "no session is open"
            self.in_session = not self.in_session
        if path == "update_weights_from_tensor":
            if not self.in_session or self.about["dp_size"] > 1:
                return "must run in a session"
            self.buckets.append(dict(pickle.loads(b64decode(body["serialized_named_tensors"][0]))))
        if path == "release_memory_occupation":
            self.dead = not self.paused or bool(self.released & tags) or self.busy > 0
            self.released |= tags
        if path == "resume_memory_occupation":
            self.dead = not tags <= self.released
            self.released -= tags
        if path.startswith("update_weights_from"):
            self.dead = "weights" in self.released
        self.version = body.get("weight_version") or body.get("new_version") or self.version
        return ""


def join(body: dict[str, Any], seconds: int) -> Any:
    """Join a trainer's group, as torch's init_process_group does for the backend `cpu:gloo`."""
    from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore  # takes seconds, for few tests

    name, wait = body["group_name"], timedelta(seconds=seconds)
    store = TCPStore(body["master_address"], body["master_port"], None, False, wait)
    keys = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    return ProcessGroupGloo(keys, 1, body["world_size"], timeout=wait)


def receive(group: Any, body: dict[str, Any]) -> dict[str, Any]:
    """The tensors of one broadcast."""
    import torch

    dtypes = [getattr(torch, dtype) for dtype in body["dtypes"]]
    sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in zip(dtypes, body["shapes"], strict=True)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    group.broadcast([flat]).wait()
    parts = zip(body["names"], flat.split(sizes), dtypes, body["shapes"], strict=True)
    return {name: part.view(dtype).view(shape) for name, part, dtype, shape in parts}


Start = Callable[..., Awaitable[tuple[str, ...]]]
"""The fixture `start`: it serves the doubles it is given and returns their addresses."""


class Doubles:
    """Several servers, each at its own address."""

    def __init__(self) -> None:
        self._servers: list[TestServer] = []

    async def start(self, doubles: Sequence[Double], port: int | None = None) -> tuple[str, ...]:
        """Their addresses. `port`: that of a single one."""
        urls = []
        for double in doubles:
            app = web.Application(client_max_size=1 << 28)
            app.router.add_route("*", "/{path:.+}", double.answer)
            server = TestServer(app, port=port)
            await server.start_server()
            self._servers.append(server)
            urls.append(str(server.make_url("")).rstrip("/"))
        return tuple(urls)

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers))
