"""Samples from an engine over SGLang's `/generate`: token ids in; ids, logprobs and weight versions out.

This is the only module that knows the names of SGLang's parameters; the handler asks with a `SamplingRequest`, and a
`Sampling` fills up. Left out: choosing between replicas and any retry (replicas/fleet.py).
"""

import asyncio
import os
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
import msgspec
from httptools import HttpParserError

from proxy.call import Grammar
from proxy.engine.engine_call import EngineError, GenerateEvent, Sampling, SamplingRequest, error_kind
from proxy.engine.http import Connections

RESERVED_TOKENS = 8
"""Tokens of the context that SGLang 0.5.23 keeps for itself: it refuses prompts that come closer to the end. One that
drafts tokens may keep more (`ServerDescription.reserved`)."""
ABORT_SECONDS = 5
"""How long an abandoned call is waited for after the engine was told to stop it."""
EVENT = b"data: {"
STATUS_TIMEOUT = aiohttp.ClientTimeout(total=10)
LOADS_TIMEOUT = aiohttp.ClientTimeout(total=2)
"""Short, as somebody who looks at all engines waits for the slowest."""
LOAD_TIMEOUT = aiohttp.ClientTimeout(total=600)
T = TypeVar("T")

_decode_event = msgspec.json.Decoder(GenerateEvent).decode


class _ModelInfo(msgspec.Struct):
    weight_version: str | None = None


class _ServerInfo(msgspec.Struct):
    dp_size: int = 1
    attn_dp_size: int = 1
    speculative_eagle_topk: int | None = None
    speculative_num_steps: int | None = None
    speculative_num_draft_tokens: int | None = None
    hicache_storage_backend: str | None = None
    enable_hierarchical_cache: bool = False


class _Load(msgspec.Struct):
    num_waiting_reqs: int


class _Loads(msgspec.Struct):
    loads: list[_Load]
    """One of each data-parallel rank."""


class _Done(msgspec.Struct):
    success: bool = False
    message: str = ""


@dataclass(frozen=True)
class ServerDescription:
    """What a server says about itself."""

    ranks: int
    """Data-parallel ranks, of replicas or of attention; each has a prefix cache of its own."""
    stores: bool
    """Whether it stores cached prefixes outside of itself."""
    layered: bool
    """Whether it moves cached prefixes to the host's memory and back (HiCache)."""
    reserved: int = RESERVED_TOKENS
    """Tokens of the context that it keeps for itself."""


class _NoRoute(EngineError):
    """The server has no such route."""


class EngineClient:
    """One engine, one connection pool. Make it inside the running event loop."""

    def __init__(self, url: str, silence_seconds: float = 600):
        self.url = url.rstrip("/")
        self._connections = Connections(self.url, silence_seconds)
        self._http = aiohttp.ClientSession(
            timeout=STATUS_TIMEOUT
        )  # for rare requests; /generate has a client of its own
        self._calls: set[_Answer] = set()

    async def close(self) -> None:
        self._connections.close()
        await self._http.close()

    async def healthy(self) -> bool:
        try:
            async with self._http.get(f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=5)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def version(self) -> str:
        """Ask for the weight version, empty when the engine names none; EngineError when it does not answer."""
        return (await self._get("/model_info", _ModelInfo)).weight_version or ""

    async def description(self) -> ServerDescription | None:
        """Ask what kind of server it is; None where it does not say now, as SGLang does not while it loads weights.

        Only SGLang has the route. Other servers count as one rank without a shared cache.
        """
        try:
            server = await self._get("/server_info", _ServerInfo)
        except _NoRoute:
            server = _ServerInfo()
        except EngineError:
            return None
        stores = server.hicache_storage_backend is not None
        ranks = server.dp_size * server.attn_dp_size
        return ServerDescription(ranks, stores, server.enable_hierarchical_cache, _reserved(server))

    async def queue(self) -> int | None:
        """Ask how many calls wait there before they are computed. None: it does not tell, as only SGLang does."""
        try:
            told = await self._get("/v1/loads?include=core", _Loads, LOADS_TIMEOUT)
        except EngineError:
            return None
        return sum(rank.num_waiting_reqs for rank in told.loads) if told.loads else None

    async def load(self, directory: str, version: str) -> None:
        """Have it load the weights of a directory under this name; EngineError when it does not."""
        await self._post("/update_weights_from_disk", model_path=directory, weight_version=version, flush_cache=True)

    async def rename(self, version: str) -> None:
        """Change the name of its weights."""
        await self._post("/update_weight_version", new_version=version, abort_all_requests=False)

    async def _post(self, path: str, **body: Any) -> None:
        try:
            async with self._http.post(f"{self.url}{path}", json=body, timeout=LOAD_TIMEOUT) as answer:
                done = msgspec.json.decode(await answer.read(), type=_Done)
        except (aiohttp.ClientError, TimeoutError, ConnectionError, msgspec.DecodeError) as error:
            raise EngineError("failed", f"the engine at {self.url} did not answer {path} ({error})") from error
        if not done.success:
            raise EngineError("failed", f"the engine at {self.url} failed at {path}: {done.message[:300]}")

    async def _get(self, path: str, kind: type[T], timeout: aiohttp.ClientTimeout = STATUS_TIMEOUT) -> T:
        try:
            async with self._http.get(f"{self.url}{path}", timeout=timeout) as answer:
                if answer.status != 200:
                    error = _NoRoute if answer.status == 404 else EngineError
                    raise error("failed", f"the engine at {self.url} answers {path} with HTTP {answer.status}")
                return msgspec.json.decode(await answer.read(), type=kind)
        except aiohttp.ClientConnectorError as error:
            raise EngineError("unreachable", f"the engine at {self.url} does not answer ({error})") from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError, msgspec.DecodeError) as error:
            raise EngineError("failed", f"the engine at {self.url} did not answer {path} ({error})") from error

    def break_off_silent(self, why: str) -> None:
        """End the calls of which nothing has been received: EngineError `died`, with this reason."""
        for answer in self._calls:
            if answer.silent:
                answer.ended(EngineError("died", f"the engine at {self.url} {why}"))

    async def sample(self, request: SamplingRequest, into: Sampling) -> AsyncGenerator[list[int], None]:
        """Yield the new token ids of each event (of the whole answer when not streamed) while filling `into`.

        When the iteration is cancelled or closed early, or `into` has enough, the engine is asked to stop, and what it
        still sends is kept.
        """
        rid, answer = os.urandom(16).hex(), _Answer(into)
        try:
            connection = await self._connections.post("/generate", _body(rid, request, into), answer)
        except ssl.SSLError as error:
            raise EngineError("unreachable", f"the engine at {self.url} cannot be trusted ({error})") from error
        except OSError as error:
            reason = error.strerror or str(error) or "no connection in time"
            message = f"the engine at {self.url} does not answer ({reason}); start it with: proxy engine"
            raise EngineError("unreachable", message) from error
        self._calls.add(answer)
        try:
            while (ids := await answer.next()) is not None:
                yield ids
                if into.enough is not None:
                    break
            else:
                self._check(answer, into)
        finally:
            self._calls.discard(answer)
            if not answer.over:
                await asyncio.shield(self._abort(rid, answer))
            if not answer.whole:
                connection.close()

    def _check(self, answer: "_Answer", into: Sampling) -> None:
        """Raise EngineError for an answer that is not complete."""
        error = answer.error
        if isinstance(error, EngineError):
            raise error
        if isinstance(error, TimeoutError):
            raise EngineError("silent", f"the engine at {self.url} sent nothing for too long; restart it") from error
        if isinstance(error, (OSError, HttpParserError, msgspec.DecodeError)):
            message = f"the engine at {self.url} broke off after {len(into.ids)} tokens ({error}); see its log"
            raise EngineError("died", message) from error
        if error is not None:
            raise error
        if not into.finish:
            message = f"the engine at {self.url} ended its stream after {len(into.ids)} tokens; see its log"
            raise EngineError("died", message)

    async def _abort(self, rid: str, answer: "_Answer") -> None:
        with suppress(aiohttp.ClientError, TimeoutError):
            timeout = aiohttp.ClientTimeout(total=ABORT_SECONDS)
            async with self._http.post(f"{self.url}/abort_request", json={"rid": rid}, timeout=timeout):
                pass
            async with asyncio.timeout(ABORT_SECONDS):
                while await answer.next() is not None:
                    pass


def _reserved(server: _ServerInfo) -> int:
    """The tokens of the context that a server keeps for itself.

    SGLang 0.5.23 keeps drafted tokens there (`compute_num_reserved_tokens`), with EAGLE and NEXTN only. With other ways
    of drafting this is a few more than it keeps.
    """
    branches = (server.speculative_eagle_topk or 0) * (server.speculative_num_steps or 0)
    return max(RESERVED_TOKENS, branches, server.speculative_num_draft_tokens or 0)


def _body(rid: str, request: SamplingRequest, into: Sampling) -> bytes:
    """Encode the request as the JSON of `/generate`."""
    body: dict[str, Any] = {"rid": rid, "input_ids": msgspec.Raw(request.prompt)}
    body |= {"sampling_params": _sampling_params(request), "stream": request.stream, "return_logprob": True}
    if request.top_logprobs:
        body["top_logprobs_num"] = request.top_logprobs
    if request.rank is not None:
        body["routed_dp_rank"] = request.rank
    if request.salt:
        body["cache_salt"] = request.salt
    if into.experts is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": into.experts.start}
    return msgspec.json.encode(body)


def _sampling_params(request: SamplingRequest) -> dict[str, Any]:
    """The request in the names of SGLang's `sampling_params`."""
    params: dict[str, Any] = {**request.distribution, "max_new_tokens": request.max_new_tokens}
    params |= {"skip_special_tokens": False, "stop_token_ids": list(request.end_ids)}
    if request.stop:
        params |= {"stop": list(request.stop), "no_stop_trim": True}
    if request.grammar is not None:
        params |= grammar_params(request.grammar)
    return params


def grammar_params(grammar: Grammar) -> dict[str, str]:
    """A grammar in the names of SGLang's `sampling_params`: a JSON schema, or a structural tag (xgrammar's name)."""
    if not grammar.calls:
        return {"json_schema": msgspec.json.encode(grammar.schema).decode()}
    tags = []
    for call in grammar.calls:
        content = {"type": "json_schema", "json_schema": call.schema}
        tags.append({"type": "tag", "begin": call.begin, "content": content, "end": call.end})
    rule = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
    tag = {"type": "structural_tag", "format": rule | {"stop_after_first": grammar.once}}
    return {"structural_tag": msgspec.json.encode(tag).decode()}


class _Answer:
    """Reads the answer of `/generate` into a `Sampling`.

    `over`: no more ids will come. `whole`: the answer has ended as HTTP requires, so the connection can be reused.
    """

    def __init__(self, into: Sampling):
        self._into = into
        self._status = 200
        self._streamed = False
        self._data: list[
            bytes
        ] = []  # of a stream, the parts of its last, unfinished line; else the whole answer so far
        self._new: deque[list[int]] = deque()
        self._changed = asyncio.Event()
        self.over = self.whole = False
        self.error: Exception | None = None

    @property
    def silent(self) -> bool:
        """Whether this engine call has brought no token yet. Earlier ones of the turn may have brought some."""
        return not self.over and not self._into.fresh

    async def next(self) -> list[int] | None:
        """Wait for the next ids and return them; None when the answer is over."""
        while not self._new and not self.over:
            self._changed.clear()
            await self._changed.wait()
        return self._new.popleft() if self._new else None

    def begun(self, status: int, content_type: str) -> None:
        self._status = status
        self._streamed = status == 200 and content_type == "text/event-stream"

    def received(self, data: bytes) -> None:
        self._data.append(data)
        if self._streamed and not self.over and b"\n" in data:
            *lines, rest = b"".join(self._data).split(b"\n")
            self._data = [rest]
            self._take(line[len(EVENT) - 1 :] for line in lines if line.startswith(EVENT))

    def ended(self, error: Exception | None) -> None:
        self.whole = error is None
        if self.over:
            return
        data = b"".join(self._data)
        if self._status != 200 and self.whole:
            text = data.decode(errors="replace")[:300]
            error = EngineError(error_kind(self._status), f"the engine answered HTTP {self._status}: {text}")
        elif self.whole and not self._streamed:
            self._take([data])
        elif self.whole and data.startswith(EVENT):  # a last line without its end
            self._take([data[len(EVENT) - 1 :]])
        self._finish(error)

    def _take(self, events: Iterable[bytes]) -> None:
        try:
            for data in events:
                event = _decode_event(data)
                if event.error is not None:
                    raise _reported(event.error)
                if new := self._into.extend(event):
                    self._new.append(new)
        except (EngineError, msgspec.DecodeError) as error:
            self._finish(error)
        self._changed.set()

    def _finish(self, error: Exception | None) -> None:
        self.error = self.error or error
        self.over = True
        self._changed.set()


def _reported(error: Any) -> EngineError:
    """The error of an event. SGLang refuses streamed calls by one: after HTTP 200, with the status as its `code`."""
    told = error if isinstance(error, dict) else {}
    code = told.get("code")
    kind = error_kind(code) if isinstance(code, int) else "failed"
    return EngineError(kind, f"the engine reported an error: {str(told.get('message', error))[:300]}")
