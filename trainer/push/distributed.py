"""Push by broadcasts: the trainer is rank 0 of a process group with the engine's tensor ranks (NCCL, or gloo on the
CPU).

Each engine gets its own group, made for one push. In one group of all engines, an engine that dies in mid-transfer
would leave the others waiting inside of a collective until it times out. The price: the trainer sends the weights once
per engine. The group is independent of the trainer's own process groups: it consists of a store and a backend, and is
not registered in torch.distributed.
"""

import os
import secrets
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Lock, Thread
from typing import Any
from urllib.parse import urlsplit

from trainer.push.target import PushFailed, PushTarget
from trainer.push.weights import Bucket, Weights

BACKENDS = {"cuda": "nccl"}
"""Backend by the engine's device; gloo for others."""
_ENVIRONMENT = Lock()
"""Guards os.environ while `_nccl_raises` changes it: each engine has a thread that pushes to it."""


def send(engine: PushTarget, weights: Weights) -> None:
    """Broadcast bucket after bucket; the last one sets the version and drops the old caches. Raises PushFailed."""
    import torch  # takes seconds to import, which pushes by disk need not spend

    if _backend(engine) == "nccl" and not torch.cuda.is_available():
        raise PushFailed("needs NCCL for a broadcast, and this trainer has no GPU; set push.way to tensor or disk")
    # A unique name: the engine may still have the group of a trainer that died.
    name = f"blackforge-{weights.version}-{secrets.token_hex(4)}"
    with _group(engine, name) as backend, engine.session():
        for bucket in weights.buckets(engine.options.BUCKET_BYTES):
            _broadcast(engine, backend, bucket, {"group_name": name, "weight_version": weights.version})


def _broadcast(engine: PushTarget, backend: Any, bucket: Bucket, about: dict[str, str]) -> None:
    """Send one bucket as one tensor of bytes, and tell the engine meanwhile how to cut it.

    A thread sends, because NCCL returns from the first broadcast only when the engine has joined it, which the engine
    does when it is asked. The thread is a daemon: if the engine refuses, NCCL may never return.
    """
    import torch

    tensors = [tensor for _, tensor in bucket.tensors]
    flat = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in tensors]).to(_device(engine))
    body: dict[str, Any] = {
        "names": [name for name, _ in bucket.tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        "shapes": [list(tensor.shape) for tensor in tensors],
        "group_name": about["group_name"],
        "load_format": "flattened_bucket",
        "flush_cache": bucket.last,
    }
    if bucket.last:
        body["weight_version"] = about["weight_version"]
    sent: Future[None] = Future()
    Thread(target=_send, args=(backend, flat, sent), daemon=True).start()
    try:
        engine.load("/update_weights_from_distributed", body)
    except PushFailed as error:
        if sent.done() and (cause := sent.exception()):  # the engine may have failed because nothing was sent
            reason = f"{error}; the broadcast to it failed, too ({_first_line(cause)})"
            raise PushFailed(reason, error.lost) from cause
        raise
    try:
        sent.result(engine.options.timeout_seconds)
    except Exception as error:  # torch raises RuntimeError for a peer that is gone; any other error is the sender's own
        raise PushFailed(f"was lost during a broadcast ({_first_line(error)})") from error


def _send(backend: Any, flat: Any, sent: "Future[None]") -> None:
    """Broadcast a tensor; `sent` tells the end or the error."""
    try:
        backend.broadcast([flat]).wait()
        sent.set_result(None)
    except Exception as error:  # whatever it is, the push must hear of it at once instead of waiting for the end
        sent.set_exception(error)


@contextmanager
def _group(engine: PushTarget, name: str) -> Iterator[Any]:
    """Yield the backend of a group of this process (rank 0) and the engine's ranks; end the group with the block.

    The thread sends the invitation, because both sides wait in their call until the other one has joined.
    """
    import torch.distributed as dist

    seconds = timedelta(seconds=engine.options.ANSWER_SECONDS)
    address = engine.options.address or _address(engine.url)
    world = 1 + engine.about.tp_size
    with ThreadPoolExecutor(1) as thread:
        try:
            store = dist.TCPStore(address, 0, None, True, seconds, wait_for_workers=False)
            invitation = {"master_address": address, "master_port": store.port, "rank_offset": 1, "world_size": world}
            invitation |= {"group_name": name, "backend": f"{_device(engine)}:{_backend(engine)}"}
            joined = thread.submit(engine.ask, "/init_weights_update_group", invitation)
            backend = _join(engine, name, store, world)
        except (RuntimeError, OSError) as error:  # torch raises RuntimeError for stores and backends
            raise PushFailed(
                f"did not join the group at {address} ({_first_line(error)}); set push.address to an address of this "
                "machine that the engine can reach"
            ) from error
        joined.result()
    try:
        yield backend
    finally:
        with suppress(PushFailed):  # nothing can be done about it, and an error of the block says more
            engine.ask("/destroy_weights_update_group", {"group_name": name})
        backend.abort()


def _join(engine: PushTarget, name: str, store: Any, world: int) -> Any:
    """Build what torch's init_process_group builds for the backend `DEVICE:BACKEND`, with the same keys in the store.

    The keys must agree with those of the engine: SGLang 0.5.23 does the same (init_custom_process_group). Blocks until
    the engine has joined (gloo); with NCCL, the first broadcast blocks.
    """
    from torch.distributed import PrefixStore
    from torch.distributed import distributed_c10d as c10d

    keys = PrefixStore(f"{_device(engine)}/", PrefixStore(f"{name}/", PrefixStore(name, store)))
    backend: c10d.ProcessGroupGloo | c10d.ProcessGroupNCCL
    if _backend(engine) == "gloo":
        backend = c10d.ProcessGroupGloo(keys, 0, world, timeout=timedelta(seconds=engine.options.ANSWER_SECONDS))
    else:
        with _nccl_raises():
            backend = c10d.ProcessGroupNCCL(keys, 0, world, c10d.ProcessGroupNCCL.Options())
    backend.set_timeout(timedelta(seconds=engine.options.timeout_seconds))
    return backend


@contextmanager
def _nccl_raises() -> Iterator[None]:
    """Groups made within raise errors and timeouts in `wait`. By default, a lost engine ends this whole process.

    torch reads these variables when it makes a group. The lock: other threads make groups for other engines.
    """
    wanted = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    with _ENVIRONMENT:
        before = {name: os.environ.pop(name, None) for name in wanted}
        os.environ.update(wanted)
        try:
            yield
        finally:
            for name, value in before.items():
                del os.environ[name]
                if value is not None:
                    os.environ[name] = value


def _backend(engine: PushTarget) -> str:
    """gloo | nccl"""
    return BACKENDS.get(engine.about.device or "", "gloo")


def _device(engine: PushTarget) -> str:
    """The device of tensors for this backend."""
    return "cpu" if _backend(engine) == "gloo" else "cuda"


def _address(url: str) -> str:
    """This machine's address on the route to the engine."""
    there = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((there.hostname or "", there.port or 80))  # for UDP, this only chooses a route and sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: BaseException) -> str:
    return (str(error) or "no answer").splitlines()[0][:200]
