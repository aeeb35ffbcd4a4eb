"""Samples from an engine over SGLang's `/generate`: token ids in; ids, logprobs and weight versions out.

This is the only module that knows the names of SGLang's parameters; the handler asks with a `SamplingRequest`.
One `Sampling` is one call. It fills up while the engine sends; what has come stays readable when the engine dies or the
client goes away. Left out: choosing between replicas and any retry (fleet.py).
"""

import asyncio
import ssl
import uuid
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
from httptools import HttpParserError

from proxy.call import Grammar
from proxy.engine.http import Connections
from proxy.engine.moe_config import Mixture
from proxy.pool.completions.records import VersionSpan
from proxy.pool.completions.routed_experts import RoutedExperts, narrowed

RESERVED_TOKENS = 8
"""Tokens of the context that SGLang 0.5.23 keeps for itself: it refuses prompts that come closer to the end."""
ABORT_SECONDS = 5
EVENT = b"data: {"
REFUSALS = (400, 413, 422)
ASK_TIMEOUT = aiohttp.ClientTimeout(total=10)
T = TypeVar("T")


class EngineError(Exception):
    """A call that the engine did not serve.

    `kind` is unreachable | died | silent | busy | refused | failed | no_logprobs | no_experts.
    """

    def __init__(self, kind: str, message: str):
        super().__init__(message)
        self.kind = kind


Id = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    completion_tokens: int = 0
    weight_version: str | None = None
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] = []
    cached_tokens: int = 0
    routed_experts: bytes | None = None


class _Model(msgspec.Struct):
    weight_version: str | None = None


class _Server(msgspec.Struct):
    dp_size: int = 1
    hicache_storage_backend: str | None = None
    enable_hierarchical_cache: bool = False


class _Event(msgspec.Struct):
    output_ids: list[Id] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True)
class Description:
    """What a server says of itself."""

    ranks: int
    """Data-parallel ones."""
    stores: bool
    """It stores cached prefixes outside of itself."""
    layered: bool
    """It moves cached prefixes to the host's memory and back (HiCache)."""


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """One model call for the engine: the prompt's tokens, how to sample and where to stop."""

    prompt: bytes
    """The prompt's token ids as a JSON list."""
    prompt_length: int
    """The number of the prompt's tokens."""
    max_new_tokens: int
    distribution: Mapping[str, float] = field(default_factory=dict)
    """Sampling parameters (temperature, top_p, ...); the engine's defaults hold for what is left out."""
    end_ids: Sequence[int] = ()
    """Tokens that end the answer, besides the model's own end token."""
    stop: Sequence[str] = ()
    """Texts that end the answer. The engine returns their tokens, too, so that the row has all that was sampled."""
    grammar: Grammar | None = None
    """The form that the engine enforces; None where the answer is free."""
    stream: bool = False
    rank: int | None = None
    """The data-parallel rank that samples; the engine chooses when None."""
    salt: str = ""
    """The engine uses only those cached prefixes that were stored with the same salt."""
    routed_from: int | None = None
    """The engine returns the chosen experts from this position on; None: it returns none."""


@dataclass
class Sampling:
    """What has been sampled so far. `finish` is empty until the engine has said why it stopped."""

    ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    versions: tuple[VersionSpan, ...] = ()
    finish: str = ""
    matched: int | str | list[int] | None = None
    cached_tokens: int = 0
    version: str = ""
    """The weights that sampled the last tokens so far."""
    routed: bytes | None = None
    """The chosen experts as the engine sends them, with its last event: int32 [positions, layers, top_k]."""
    experts: RoutedExperts | None = None
    """The same, read; None until then."""

    def extend(self, event: _Event) -> list[int]:
        """Take what an event adds and return the new ids; events that repeat what came before are understood."""
        meta = event.meta_info
        fresh = meta.completion_tokens - len(self.ids) if meta.completion_tokens else len(event.output_ids)
        if fresh > len(event.output_ids):
            sent = len(event.output_ids)
            raise EngineError(
                "failed", f"the engine skipped tokens ({fresh} new, {sent} sent); use SGLang 0.5.23 or later"
            )
        new = event.output_ids[len(event.output_ids) - fresh :]
        self.ids.extend(new)
        entries = meta.output_token_logprobs[-fresh:] if fresh else []
        if [entry[1] for entry in entries] == new:
            self.logprobs.extend(entry[0] for entry in entries if entry[0] is not None)
        self.cached_tokens, self.version = meta.cached_tokens, meta.weight_version or self.version
        self.routed = self.routed if meta.routed_experts is None else meta.routed_experts
        if meta.finish_reason is not None:
            self._end(meta, meta.finish_reason)
        return new

    def _end(self, meta: _Meta, finish: _Finish) -> None:
        spans = meta.weight_versions or []
        self.versions = tuple(VersionSpan(span.version, span.start, span.end) for span in spans)
        self.finish, self.matched = finish.type, finish.matched
        if finish.type == "abort" and finish.status_code:
            raise EngineError(_kind(finish.status_code), f"the engine ended the call: {finish.message}")

    def check(self) -> None:
        """Raise EngineError unless the engine ended the answer by itself and every token has its logprob."""
        if len(self.logprobs) != len(self.ids):
            raise EngineError(
                "no_logprobs",
                f"the engine returned {len(self.logprobs)} logprobs for {len(self.ids)} tokens; "
                "use SGLang 0.5.23 or later, or the scripted engine",
            )
        if self.finish == "abort":
            raise EngineError("failed", "the engine aborted the call (paused or restarted?); send it again")

    def read_experts(self, prompt_length: int, start: int, mixture: Mixture) -> None:
        """Take the experts of the positions from `start` to the last sampled token, which has none."""
        wanted = prompt_length + len(self.ids) - 1 - start
        try:
            found = None if self.routed is None else narrowed(self.routed, start, mixture.layers, mixture.top_k)
        except ValueError as error:
            raise EngineError("no_experts", f"the experts that the engine names cannot be read: {error}") from error
        if found is None or found.end - start != wanted:
            raise EngineError(
                "no_experts",
                f"the engine named the experts of {found.end - start if found else 0} positions, not of {wanted}; "
                "start it with --enable-return-routed-experts, or set engine.routed_experts = false",
            )
        self.routed, self.experts = None, found


class EngineClient:
    """One engine, one connection pool. Make it inside the running event loop."""

    def __init__(self, url: str, silence_seconds: float = 600):
        self.url = url.rstrip("/")
        self._connections = Connections(self.url, silence_seconds)
        self._http = aiohttp.ClientSession(timeout=ASK_TIMEOUT)  # for what is asked now and then

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
        """The weights that the engine serves, empty when it names none; EngineError when it does not answer."""
        return (await self._ask("/model_info", _Model)).weight_version or ""

    async def description(self) -> "Description":
        """What kind of server it is."""
        try:
            server = await self._ask("/server_info", _Server)
        except EngineError:  # what is not an SGLang server need not know; an engine that is busy says so later
            server = _Server()
        stores = server.hicache_storage_backend is not None
        return Description(server.dp_size, stores, server.enable_hierarchical_cache)

    async def _ask(self, path: str, kind: type[T]) -> T:
        try:
            async with self._http.get(f"{self.url}{path}") as answer:
                if answer.status != 200:
                    raise EngineError("failed", f"the engine at {self.url} answers {path} with HTTP {answer.status}")
                return msgspec.json.decode(await answer.read(), type=kind)
        except aiohttp.ClientConnectorError as error:
            raise EngineError("unreachable", f"the engine at {self.url} does not answer ({error})") from error
        except (aiohttp.ClientError, TimeoutError, ConnectionError, msgspec.DecodeError) as error:
            raise EngineError("failed", f"the engine at {self.url} did not answer {path} ({error})") from error

    async def sample(self, request: SamplingRequest, into: Sampling) -> AsyncGenerator[list[int], None]:
        """Yield the new token ids of each event (of the whole answer when not streamed) while filling `into`.

        When the iteration is cancelled or closed early, the engine is told to stop and what it still sends is taken.
        """
        rid, answer = uuid.uuid4().hex, _Answer(into)
        try:
            connection = await self._connections.post("/generate", _body(rid, request), answer)
        except ssl.SSLError as error:
            raise EngineError("unreachable", f"the engine at {self.url} cannot be trusted ({error})") from error
        except OSError as error:
            reason = error.strerror or str(error) or "no connection in time"
            message = f"the engine at {self.url} does not answer ({reason}); start it with: proxy engine"
            raise EngineError("unreachable", message) from error
        try:
            async for ids in answer.events():
                yield ids
            self._check(answer, into)
        finally:
            if not answer.over:
                await asyncio.shield(self._abort(rid, answer))
            if not answer.whole:
                connection.close()

    def _check(self, answer: "_Answer", into: Sampling) -> None:
        """EngineError for an answer that is not whole."""
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
                async for _ in answer.events():
                    pass


def _body(rid: str, request: SamplingRequest) -> bytes:
    """Encode the request as the JSON of `/generate`."""
    body: dict[str, Any] = {"rid": rid, "input_ids": msgspec.Raw(request.prompt)}
    body |= {"sampling_params": _sampling_params(request), "stream": request.stream, "return_logprob": True}
    if request.rank is not None:
        body["routed_dp_rank"] = request.rank
    if request.salt:
        body["cache_salt"] = request.salt
    if request.routed_from is not None:
        body |= {"return_routed_experts": True, "routed_experts_start_len": request.routed_from}
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
    """The answer of `/generate` on its way into a `Sampling`. `whole`: it has ended as HTTP says."""

    def __init__(self, into: Sampling):
        self._into = into
        self._status = 200
        self._streamed = False
        self._data: list[bytes] = []  # of a stream: the line that has not ended yet, in the parts that came
        self._new: deque[list[int]] = deque()
        self._changed = asyncio.Event()
        self.over = self.whole = False
        self.error: Exception | None = None

    async def events(self) -> AsyncGenerator[list[int], None]:
        """New ids as they come, until it is over."""
        while True:
            if self._new:
                yield self._new.popleft()
            elif self.over:
                return
            else:
                self._changed.clear()
                await self._changed.wait()

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
            error = _refused(self._status, data.decode(errors="replace"))
        elif self.whole and not self._streamed:
            self._take([data])
        elif self.whole and data.startswith(EVENT):  # a last line without its end
            self._take([data[len(EVENT) - 1 :]])
        self._finish(error)

    def _take(self, events: Iterable[bytes]) -> None:
        try:
            for data in events:
                event = _decode(data)
                if event.error is not None:
                    raise EngineError("failed", f"the engine reported an error: {event.error}")
                if new := self._into.extend(event):
                    self._new.append(new)
        except (EngineError, msgspec.DecodeError) as error:
            self._finish(error)
        self._changed.set()

    def _finish(self, error: Exception | None) -> None:
        self.error = self.error or error
        self.over = True
        self._changed.set()


def _refused(status: int, text: str) -> EngineError:
    return EngineError(_kind(status), f"the engine answered HTTP {status}: {text[:300]}")


def _kind(status: int) -> str:
    """What a status says: the request is at fault, the engine has too much to do, or it is broken."""
    return "refused" if status in REFUSALS else "busy" if status in (429, 503) else "failed"
