"""The documents of ATIF 1.8, Harbor's Agent Trajectory Interchange Format (rfcs/0001-trajectory-format.md there).

Only what is written or read here. Fields that a document has beside these are passed over.
"""

from typing import Any, Literal

import msgspec

VERSION = "ATIF-v1.8"
OURS = "blackforge"
"""The key of `extra` under which our own fields stand."""


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
