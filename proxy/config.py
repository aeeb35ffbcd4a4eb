"""The proxy's and the engine's configuration: one TOML file for `proxy serve` and `proxy engine`.

Relative paths are relative to the file. The smallest file names the pool and the model.
"""

from pathlib import Path
from typing import Annotated

import msgspec

from proxy.parsing.formats import FORMATS
from proxy.pool.errors import UserError

Count = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


class ProxyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    """Listening address. On any other than loopback, only issued keys are served and there must be an admin key."""
    port: int = 0
    """0 takes a free one; the ready file and the first line of output say which."""
    history: str = "splice"
    """splice: recorded tokens stand in for turns sampled in the same attempt. faithful: always as the template says."""

    keepalive_seconds: float = 25
    """How long a stream may be silent before the client is told to go on waiting, in the way its dialect has for it."""

    admin_key_file: str = ""
    """File with the admin key, which then guards all routes but the models'. Never an agent's to read."""
    admin_key_env: str = ""
    """Environment variable with the admin key, in place of a file."""

    sandbox_socket: str = ""
    """Path of a Unix socket on which sandboxes find the model routes, and nothing else, for issued keys."""
    sandbox_address: str = ""
    """HOST:PORT of a listener of the same kind, for the relays of sandboxes on other machines."""


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one request may cost; more is refused in its dialect's error form."""

    body_bytes: Count = 1 << 25
    """After decompression."""
    body_seconds: Seconds = 120
    """Until the last byte of the body has come."""
    header_bytes: Count = 1 << 16
    """Of the request line, and of each header."""
    headers: Count = 128
    nesting: Count = 200
    """Levels of objects and arrays in a tool, in a call of it, and in options. Templates recurse into all of them."""
    messages: Count = 20_000
    tools: Count = 2_000
    stop_strings: Count = 64
    """Each is looked for in every token's text."""
    choices: Count = 64
    """Answers to one request (n, candidateCount), each of which is a call at work."""
    key_chars: Count = 512


class AdmissionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many model calls may be at work at a time. Others wait in turn, run by run."""

    calls: Count = 4096
    calls_per_run: Count = 2048
    """A session outside of runs counts as a run of its own."""
    wait_seconds: Seconds = 240
    """How long a call may wait before it is answered with 429; streams show signs of life meanwhile. Longer than
    proxy.keepalive_seconds, so that codex, which gives up on a 429, learns of it from its stream."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    """Directory of the model in Hugging Face format."""
    url: str | tuple[str, ...] = ""
    """Address of the running engine, or a list of its replicas; how many data-parallel ranks each has, it says itself.
    litellm:PROVIDER/MODEL is another provider's model, recorded as text and never trained
    (proxy/recording/provider.py). Empty where `proxy serve --engine` says it, or for `proxy engine` itself."""
    device: str = "auto"
    """auto | cpu | cuda. auto is cuda where a CUDA device exists."""
    dtype: str = "auto"
    """As the model says, or float32, bfloat16, float16. float32 makes logprobs comparable to the trainer's."""
    context_length: int | None = None
    """Tokens of prompt and reply together. The model's own limit when unset."""
    max_total_tokens: int | None = None
    """Tokens in the KV cache, over all requests. SGLang's choice when unset; on the CPU 65536."""
    port: int = 0
    """Port of `proxy engine`. 0 takes a free one."""
    threads: int = 1
    """OMP threads per engine process on the CPU."""
    tool_format: str = "auto"
    """How the model writes tool calls: a name of proxy/parsing/formats. auto looks for the markers in the
    model's directory."""
    start_seconds: float = 300
    """How long the engine may take until it is healthy."""
    silence_seconds: float = 600
    """How long the engine may send nothing on a call before the call fails."""
    routed_experts: bool = False
    """Record which experts a mixture of experts chose for each token, so that the trainer can replay it
    (loss.routing). Not with a hierarchical cache, which brings prefixes back without them."""
    extra_args: tuple[str, ...] = ()
    """More arguments for sglang.launch_server."""


class SamplingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    max_new_tokens: int | None = None
    """Upper limit of sampled tokens per call, whatever the client asks. The rest of the context when unset."""


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    engine: EngineConfig
    pool: str = "pool.db"
    """SQLite file or database URL."""
    proxy: ProxyConfig = ProxyConfig()
    sampling: SamplingConfig = SamplingConfig()
    limits: LimitsConfig = LimitsConfig()
    admission: AdmissionConfig = AdmissionConfig()


CHOICES: dict[str, tuple[str, ...]] = {
    "history": ("splice", "faithful"),
    "device": ("auto", "cpu", "cuda"),
    "tool_format": ("auto", *FORMATS),
}


def engine_urls(url: str | tuple[str, ...]) -> tuple[str, ...]:
    """The addresses in `engine.url` or --engine; UserError when there are none, or one that cannot be an engine's."""
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
                f"the engine's address {one!r} is no http URL; write http://HOST:PORT, or litellm:PROVIDER/MODEL alone"
            )
        if urls.count(one) > 1:
            raise UserError(f"the engine's address {one} is named twice; name every replica once")
    return urls


def load_config(path: Path) -> Config:
    """Read and check the configuration; UserError names the field."""
    try:
        config = msgspec.toml.decode(path.read_bytes(), type=Config)
    except OSError as error:
        raise UserError(f"the configuration {path} cannot be read ({error.strerror}); name an existing file") from error
    except msgspec.DecodeError as error:  # ValidationError is one
        raise UserError(f"the configuration {path} is refused ({error}); see proxy/config.py for its fields") from error
    chosen = (("history", config.proxy.history), ("device", config.engine.device))
    for name, value in (*chosen, ("tool_format", config.engine.tool_format)):
        if value not in CHOICES[name]:
            raise UserError(f"the configuration {path} has {name} = {value!r}; use one of {', '.join(CHOICES[name])}")
    model = str((path.parent / config.engine.model).absolute())
    pool = config.pool if "://" in config.pool else str((path.parent / config.pool).absolute())
    key_file = config.proxy.admin_key_file and str((path.parent / config.proxy.admin_key_file).absolute())
    sandboxes = config.proxy.sandbox_socket and str((path.parent / config.proxy.sandbox_socket).absolute())
    proxy = msgspec.structs.replace(config.proxy, admin_key_file=key_file, sandbox_socket=sandboxes)
    engine = msgspec.structs.replace(config.engine, model=model)
    return msgspec.structs.replace(config, pool=pool, engine=engine, proxy=proxy)
