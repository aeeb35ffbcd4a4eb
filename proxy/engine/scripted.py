"""An engine without a model: ordinary code answers, over the same `/generate` protocol as SGLang.

A script is a callable `(prompt_text, prompt_ids) -> str | ScriptedReply | Fault`. The answer is tokenised with the
model's own tokenizer and ends with its end-of-turn token. Each token is certain under the script, so its logprob is
0.0, and its weight version is "scripted" until an update names another. Teachers use it, and every test that needs a
model that obeys. It can act as a mixture of experts, whose choices are computed by `chosen`. Left out: batching, prefix
caches, weights; updates change only the version's name.
"""

import asyncio
import importlib.util
import uuid
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from proxy.engine.moe_config import Mixture
from proxy.pool.completions.records import int_bytes
from proxy.pool.errors import UserError
from proxy.prompt.template import ChatTemplate


@dataclass(frozen=True)
class ScriptedReply:
    """An answer with details. Without `end`, it stops as if it had reached the length limit; `ids` replace `text`."""

    text: str
    end: bool = True
    seconds_per_token: float = 0.0
    tokens_per_event: int = 1
    logprobs: int | None = None
    """How many of the tokens have a logprob; all when None."""
    ids: tuple[int, ...] = ()
    versions: tuple[tuple[str, int, int], ...] | None = None
    """Weight versions that it reports instead of the true ones: (version, start, end) of tokens [start, end)."""
    verifications: int = 0
    """How many checks of drafted tokens it reports; 0: it does not mention drafts."""


@dataclass(frozen=True)
class Fault:
    """A failure on purpose: an HTTP `status`, or a failure after `after` tokens of `text`.

    The latter is a hang until the call is aborted (`hang`), an end without a finish reason (`cut`), an event of these
    words (`garbage`), or else a reset of the connection.
    """

    status: int = 0
    hang: bool = False
    cut: bool = False
    garbage: str = ""
    text: str = ""
    after: int = 0


Script = Callable[[str, Sequence[int]], str | ScriptedReply | Fault]


def load_script(where: str) -> Script:
    """The callable at `FILE.py:NAME`."""
    file, _, name = where.rpartition(":")
    spec = importlib.util.spec_from_file_location("blackforge_script", file) if Path(file).is_file() else None
    if spec is None or spec.loader is None:
        raise UserError(f"the script {where!r} names no Python file; write it as FILE.py:NAME")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    script = vars(module).get(name)
    if not callable(script):
        raise UserError(f"the script file {file} has no callable {name!r}; define it or name another")
    return script


class _GenerateRequest(msgspec.Struct):
    input_ids: list[int]
    sampling_params: dict[str, Any] = {}
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    rid: str = ""
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0


class _ResetConnection(Exception):
    """The script asks for a reset of the connection."""


class _EndAnswer(Exception):
    """The script asks to end the answer here; the text is its last event."""


class ScriptedEngine:
    """The routes of SGLang that the proxy and the trainer use."""

    def __init__(self, script: Script, template: ChatTemplate):
        self.version = "scripted"
        self.calls = 0
        """Calls received so far."""
        self.last_params: dict[str, Any] = {}
        """The sampling parameters of the last call."""
        self.aborted = 0
        """Calls ended by /abort_request."""
        self.script = script
        """The script; may be replaced at any time."""
        self.server: dict[str, Any] = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "device": "cpu"}
        """What it answers to /server_info."""
        self.waiting: list[int] | None = None
        """The number of waiting calls that it reports for each of its ranks. None: it does not answer."""
        self._template = template
        self.mixture: Mixture | None = None
        """Set: calls that ask for experts get some, as `chosen` computes them."""
        self.running = asyncio.Event()
        """Cleared while the engine is paused."""
        self.running.set()
        self._live: dict[str, asyncio.Event] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/loads", self._loads)
        for path in ("/health", "/model_info"):
            app.router.add_get(path, self._info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/update_weight_version", self._name_version)
        app.router.add_post("/weights_checker", self._checksums)
        app.router.add_route("*", "/flush_cache", self._info)
        return app

    async def _info(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version, "model_path": str(self._template.directory)})

    async def _pause(self, _request: web.Request) -> web.Response:
        self.running.clear()
        return web.json_response({"status": "ok"})

    async def _continue(self, _request: web.Request) -> web.Response:
        self.running.set()
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        self.version = (await request.json()).get("weight_version") or self.version
        return web.json_response({"success": True, "message": "the script does not change", "num_paused_requests": 0})

    async def _server_info(self, _request: web.Request) -> web.Response:
        return web.json_response(self.server)

    async def _loads(self, _request: web.Request) -> web.Response:
        if self.waiting is None:
            return _error(404, "a script has no queue")
        return web.json_response({"loads": [{"num_waiting_reqs": count} for count in self.waiting]})

    async def _name_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def _checksums(self, _request: web.Request) -> web.Response:
        return web.json_response({"success": True, "ranks": [{"per_gpu_checksum": "a script has no weights"}]})

    async def _abort(self, request: web.Request) -> web.Response:
        live = self._live.get((await request.json()).get("rid", ""))
        if live is not None:
            live.set()
            self.aborted += 1
        return web.json_response({})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        try:
            generate = msgspec.json.decode(await request.read(), type=_GenerateRequest)
        except msgspec.DecodeError as error:
            return _error(400, str(error))
        self.last_params = generate.sampling_params
        answer = self.script(self._template.decode(generate.input_ids), generate.input_ids)
        if isinstance(answer, Fault) and answer.status:
            return _error(answer.status, "the script says so")
        turn = _ScriptedAnswer(generate, answer, self._template)
        turn.mixture = self.mixture if generate.return_routed_experts else None
        self._live[turn.rid] = turn.aborted
        try:
            return await (self._stream if generate.stream else self._whole)(request, turn)
        except _ResetConnection:
            assert request.transport is not None, "the client left before the reset"
            request.transport.abort()
            return web.Response()
        finally:
            del self._live[turn.rid]

    async def _stream(self, request: web.Request, turn: "_ScriptedAnswer") -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while turn.finish is None:
            start = len(turn.sent)
            try:
                await self._advance(turn, turn.reply.tokens_per_event)
            except _EndAnswer as end:
                await response.write(b"data: " + str(end).encode() + b"\n\n" if str(end) else b"")
                return response
            await response.write(b"data: " + msgspec.json.encode(turn.event(start, self.version)) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _whole(self, _request: web.Request, turn: "_ScriptedAnswer") -> web.Response:
        while turn.finish is None:
            try:
                await self._advance(turn, len(turn.ids) + 1)
            except _EndAnswer as end:
                body = str(end).encode() or msgspec.json.encode(turn.event(0, self.version))
                return web.Response(body=body, content_type="application/json")
        return web.Response(body=msgspec.json.encode(turn.event(0, self.version)), content_type="application/json")

    async def _advance(self, turn: "_ScriptedAnswer", tokens: int) -> None:
        await self.running.wait()
        if isinstance(turn.fault, Fault):
            tokens = min(tokens, turn.fault.after - len(turn.sent))
            if tokens <= 0:
                await turn.fail(turn.fault)
        if turn.reply.seconds_per_token:
            await asyncio.sleep(turn.reply.seconds_per_token * tokens)
        turn.advance(tokens, self.version)


class _ScriptedAnswer:
    """One answer while it is sent."""

    def __init__(self, request: _GenerateRequest, answer: str | ScriptedReply | Fault, template: ChatTemplate):
        self.rid = request.rid or uuid.uuid4().hex
        self.aborted = asyncio.Event()
        self.fault = answer if isinstance(answer, Fault) else None
        text = answer if isinstance(answer, str) else answer.text
        self.reply = answer if isinstance(answer, ScriptedReply) else ScriptedReply(text)
        self.request = request
        self.mixture: Mixture | None = None
        self.logprobs = self.reply.logprobs if request.return_logprob else 0
        limit = request.sampling_params.get("max_new_tokens", 128)
        ids = list(self.reply.ids or template.encode(self.reply.text)) + ([template.end] if self.reply.end else [])
        stopped = _stop_place(ids, request.sampling_params, template)
        self.ids = ids[: min(limit, stopped or len(ids))]
        self.cut = (len(ids) > limit or not self.reply.end) and not (stopped and stopped <= limit)
        self.sent: list[int] = []
        self.spans: list[dict[str, Any]] = []
        self.finish: dict[str, Any] | None = None

    async def fail(self, fault: Fault) -> None:
        if fault.hang:
            await self.aborted.wait()
        if fault.cut or fault.garbage:
            raise _EndAnswer(fault.garbage)
        raise _ResetConnection

    def advance(self, tokens: int, version: str) -> None:
        new = [] if self.aborted.is_set() else self.ids[len(self.sent) : len(self.sent) + tokens]
        if new:
            if not self.spans or self.spans[-1]["version"] != version:
                self.spans.append({"version": version, "start": len(self.sent), "end": 0})
            self.sent += new
            self.spans[-1]["end"] = len(self.sent)
        if self.aborted.is_set():
            self.finish = {"type": "abort", "message": "Aborted", "status_code": None}
        elif len(self.sent) == len(self.ids):
            length = {"type": "length", "length": len(self.sent)}
            self.finish = length if self.cut else {"type": "stop", "matched": self.ids[-1]}

    def event(self, start: int, version: str) -> dict[str, Any]:
        new = self.sent[start:]
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": self.finish,
            "prompt_tokens": len(self.request.input_ids),
        }
        meta |= {"completion_tokens": len(self.sent), "weight_version": version, "cached_tokens": 0}
        known = len(new) if self.logprobs is None else max(0, min(len(new), self.logprobs - start))
        if known:
            meta["output_token_logprobs"] = [(0.0, token, None) for token in new[:known]]
            if self.request.top_logprobs_num:  # no other token is possible
                meta["output_top_logprobs"] = [[entry] for entry in meta["output_token_logprobs"]]
        if self.finish is not None:
            named = self.reply.versions
            spans = self.spans if named is None else [{"version": v, "start": a, "end": b} for v, a, b in named]
            meta["weight_versions"] = spans
            if self.reply.verifications:
                meta["spec_verify_ct"] = self.reply.verifications
            if self.mixture is not None:
                path, start = [*self.request.input_ids, *self.sent], self.request.routed_experts_start_len
                meta["routed_experts"] = b64encode(int_bytes(chosen(path, start, self.mixture))).decode()
        return {"output_ids": new, "meta_info": meta}


def _stop_place(ids: list[int], params: dict[str, Any], template: ChatTemplate) -> int | None:
    """How many tokens there are up to a stop token or stop string, both included; None without one."""
    ends, texts = params.get("stop_token_ids") or (), params.get("stop") or ()
    places = [place for place, token in enumerate(ids, 1) if token in ends]
    if texts:
        wholes = ((place, template.decode(ids[:place])) for place in range(1, len(ids) + 1))
        places += [place for place, whole in wholes if any(text in whole for text in texts)]
    return min(places, default=None)


def chosen(path: Sequence[int], start: int, mixture: Mixture) -> list[int]:
    """The experts of the positions [start, len(path) - 1), as SGLang counts them: [positions, layers, top_k], flat."""
    places = range(start, len(path) - 1)
    layers, choices = range(mixture.layers), range(mixture.top_k)
    return [(path[at] + 3 * at + 5 * layer) % 100 + choice for at in places for layer in layers for choice in choices]


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=status)
