"""The settings of the proxy and of the engine: one TOML file for `proxy serve` and `proxy engine`.

Relative paths are relative to the file. The smallest file names the model. Left out: what one request may cost, which
is constant (proxy/http/limits.py).
"""

from pathlib import Path
from typing import Literal

import msgspec

from proxy.parsing.formats import FORMATS
from proxy.pool.errors import UserError
from proxy.pool.settings_file import Count, FilePath, Port, Seconds, demand, load_settings


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [proxy]: where the proxy listens and who may administer it."""

    host: str = "127.0.0.1"
    """Address to listen on. An address other than loopback serves issued keys only and needs an admin key."""
    port: Port = 0
    """Port to listen on. 0 takes a free one, which the ready file and the first line of output name."""
    history: Literal["splice", "faithful"] = "splice"
    """splice: use the recorded tokens of turns that were sampled in the same attempt. faithful: always render the
    whole conversation with the chat template."""
    prescribed: Literal["prefill", "grammar"] = "prefill"
    """How an answer gets the form that a request prescribes (tool_choice required or named, JSON of a schema).
    prefill: a required call is begun by the proxy, the rest is sampled freely and trained. grammar: the engine
    enforces the form, and the answer is not trained."""

    max_calls: Count = 4096
    """Model calls in flight at once, over all runs; one run has at most half of them, and so does a session outside of
    runs. Further calls wait, in turn by run."""

    admin_key_file: FilePath = ""
    """File with the admin key, which guards every route but the model routes. Agents must not be able to read it."""

    sandbox_socket: FilePath = ""
    """Path of a Unix socket that serves sandboxes: the model routes only, for issued keys only."""
    sandbox_address: str = ""
    """HOST:PORT of such a listener for the relays of sandboxes on other machines."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [engine]: the model, and the engine that serves it."""

    model: FilePath
    """Directory of the model in Hugging Face format."""
    url: str | tuple[str, ...] = ""
    """Address of the running engine, or a list with one address per replica. `litellm:PROVIDER/MODEL` stands for the
    model of another provider, whose answers are recorded as text and never trained on. Empty: `proxy serve --engine`
    gives it."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of `proxy engine`. auto: cuda where there is a GPU and `make install-gpu` was run, else cpu."""
    dtype: str = "auto"
    """Number format of the weights: float32, bfloat16 or float16. auto: the model's own, but float16 where that is
    float32 (Gemma: bfloat16). float32 makes logprobs comparable to the trainer's."""
    context_length: Count | None = None
    """Tokens of prompt and reply together. Default: the model's limit."""
    port: Port = 0
    """Port of `proxy engine`. 0 takes a free one."""
    tool_format: str = "auto"
    """How the model writes tool calls: a format of proxy/parsing/formats. auto: detected from the model's directory."""
    silence_seconds: Seconds = 600
    """A call fails when the engine sends nothing on it for this long."""
    routed_experts: bool = False
    """Record which experts a mixture of experts chose for each token, so that the trainer can replay the choice
    (loss.routing). Does not work with SGLang's hierarchical cache, which restores prefixes without the choices."""
    extra_args: tuple[str, ...] = ()
    """Further arguments of sglang.launch_server, such as --max-total-tokens."""

    def __post_init__(self) -> None:
        demand(
            self.tool_format in ("auto", *FORMATS),
            f"engine.tool_format = {self.tool_format!r} is unknown; choose from auto, {', '.join(FORMATS)}",
        )


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section [sampling]."""

    max_new_tokens: Count | None = None
    """Maximum sampled tokens per call, whatever the client asks for. Default: the rest of the context."""


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    engine: EngineConfig
    pool: FilePath = "pool.db"
    """The data pool: a SQLite file or a database URL."""
    proxy: GatewayConfig = GatewayConfig()
    sampling: SamplingConfig = SamplingConfig()


def engine_urls(url: str | tuple[str, ...]) -> tuple[str, ...]:
    """The addresses in `engine.url` or --engine. UserError when there is none, or one is not an engine's."""
    urls = tuple(one.rstrip("/") for one in ((url,) if isinstance(url, str) else url) if one)
    if not urls:
        raise UserError(
            "the engine's address is empty; set engine.url or give --engine URL of a running `proxy engine`"
        )
    for one in urls:
        if one.startswith("litellm:") and len(urls) == 1:
            continue
        if not one.startswith(("http://", "https://")):
            raise UserError(
                f"the engine's address {one!r} is not an http URL; write http://HOST:PORT, or litellm:PROVIDER/MODEL "
                "alone"
            )
        if urls.count(one) > 1:
            raise UserError(f"the engine's address {one} is named twice; name every replica once")
    return urls


def load_config(path: Path) -> ProxyConfig:
    """Read and check the file; UserError names the key."""
    return load_settings(path, ProxyConfig)
