"""The documents of ATIF 1.8, Harbor's Agent Trajectory Interchange Format (rfcs/0001-trajectory-format.md there).

Only what is written or read here. Fields that a document has beside these are passed over.
"""

from typing import Annotated, Any, Literal

import msgspec

VERSION = "ATIF-v1.8"
OURS = "blackforge"
"""The key of `extra` under which our own fields stand."""


class OurDocument(msgspec.Struct):
    """What our own export says about a document."""

    task: str | None = None
    reward: Annotated[float, msgspec.Meta(ge=-1e308, le=1e308)] | None = None
    label: str | None = None
    tokenizer: str | None = None


class OurStep(msgspec.Struct):
    """What our own export says about a step."""

    role: str | None = None


class OurMetrics(msgspec.Struct):
    """What our own export says about a call."""

    finish_reason: Literal["stop", "tool_calls", "length", "repetition", "abort", "error"] | None = None
    label: str | None = None
    seconds: Annotated[float, msgspec.Meta(ge=0)] | None = None
    given: list[tuple[int, int]] = []
    """Spans [start, end) of the answer."""
    logprobs: list[float | None] = []


class OurCall(msgspec.Struct):
    """What our own export says about a tool call."""

    arguments: str | None = None


class OurResult(msgspec.Struct):
    """What our own export says about a tool's result."""

    call: str | None = None


class AtifPart(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A piece of a content that is a list."""

    type: str
    text: str | None = None


Content = str | list[AtifPart]


class AtifCall(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A tool call."""

    tool_call_id: str
    function_name: str
    arguments: dict[str, Any]
    extra: dict[str, Any] | None = None


class AtifResult(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What a tool answered."""

    source_call_id: str | None = None
    content: Content | None = None
    extra: dict[str, Any] | None = None


class AtifObservation(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The results behind a step."""

    results: list[AtifResult]


class AtifMetrics(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Figures and tokens of the model call of a step."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_token_ids: list[int] | None = None
    completion_token_ids: list[int] | None = None
    logprobs: list[float] | None = None
    extra: dict[str, Any] | None = None


class AtifStep(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A message, with the results of the tools that it calls."""

    step_id: int
    source: Literal["system", "user", "agent"]
    message: Content
    timestamp: str | None = None
    model_name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AtifCall] | None = None
    observation: AtifObservation | None = None
    metrics: AtifMetrics | None = None
    llm_call_count: int | None = None
    is_copied_context: bool | None = None
    extra: dict[str, Any] | None = None


class AtifAgent(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Whose steps these are."""

    name: str
    version: str
    model_name: str | None = None
    tool_definitions: list[dict[str, Any]] | None = None


class AtifTotals(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Sums over the steps that are not copied."""

    total_prompt_tokens: int | None = None
    total_completion_tokens: int | None = None
    total_steps: int | None = None


class AtifDocument(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One trajectory. `steps` are AtifStep; whoever writes one gives them encoded."""

    schema_version: str
    session_id: str | None = None
    trajectory_id: str | None = None
    agent: AtifAgent
    steps: list[msgspec.Raw]
    final_metrics: AtifTotals | None = None
    extra: dict[str, Any] | None = None
    subagent_trajectories: list[msgspec.Raw] | None = None
