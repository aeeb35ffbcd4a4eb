"""Decides how a turn is sampled, and whether a turn that was sampled so can be trained on.

Left out: the engine's names for these parameters (proxy/engine/client.py).
"""

from proxy.call import Call
from proxy.dialects.structured_output import grammar
from proxy.engine.engine_call import SamplingRequest
from proxy.pool.rollouts.attempts import Attempt
from proxy.pool.untrained import Untrained, UntrainedReason
from proxy.prompt.template import ChatTemplate
from proxy.recording.turn import Turn

TRAINING_DISTRIBUTION: dict[str, float] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""The distribution that logprobs are recorded for. Forced in runs; sessions outside of runs may choose their own."""

LONG_ANSWER_TOKENS = 4096
"""An answer that may be longer is streamed from the engine in any case, so that a dead engine is noticed, and one that
repeats itself."""


def answer_limit(turn: Turn, context_length: int, max_new_tokens: int | None) -> int:
    """The tokens that the answer may have: the least of the call's limit, the configured one and the context's rest.

    `context_length`: without the tokens that engines keep for themselves.
    """
    rest = context_length - len(turn.prompt.ids)
    return min(limit for limit in (turn.call.max_new_tokens, max_new_tokens, rest) if limit is not None)


def sampling_request(turn: Turn, attempt: Attempt, template: ChatTemplate, limit: int) -> SamplingRequest:
    """Make the request for one answer of at most `limit` tokens; CallError 400 for a form that cannot be enforced."""
    enforced = turn.call.constraint is not None and turn.call.constraint.enforced
    return SamplingRequest(
        prompt=turn.prompt.written,
        prompt_length=len(turn.prompt.ids),
        max_new_tokens=limit,
        distribution=TRAINING_DISTRIBUTION | _own_parameters(turn, attempt),
        end_ids=tuple(template.ends),
        stop=turn.call.stop,
        grammar=grammar(turn.call, template.form) if enforced else None,
        top_logprobs=turn.call.logprobs or 0,
        stream=turn.call.stream or turn.single_call or limit > LONG_ANSWER_TOKENS,
        stop_repetition=attempt.purpose == "train" and limit > LONG_ANSWER_TOKENS,
    )


def why_untrained(turn: Turn, attempt: Attempt) -> Untrained | None:
    """Why a turn that was sampled to its end cannot be trained on; None when it can."""
    if turn.untrainable is not None:
        return turn.untrainable
    length, covered = len(turn.sampling.ids), 0
    named = [(span.start, span.end) for span in turn.sampling.versions]
    for start, end in sorted([*turn.sampling.given, *named]):  # no weights sampled the given ones
        if start != covered or end > length:
            break
        covered = end
    if covered != length:
        return Untrained(UntrainedReason.VERSION_MISSING, f"first {covered} of {length} tokens")
    if turn.call.constraint is not None and turn.call.constraint.enforced:
        return Untrained(UntrainedReason.CONSTRAINED)
    own = _own_parameters(turn, attempt)
    other = {name: value for name, value in own.items() if value != TRAINING_DISTRIBUTION[name]}
    return Untrained(UntrainedReason.SAMPLING_PARAMETERS, str(other)) if other else None


def without_effect(call: Call, attempt: Attempt, template: ChatTemplate) -> tuple[str, ...]:
    """The fields of the request that change nothing: those that the dialect does not read, arguments that the chat
    template does not read, and in runs the sampling parameters that differ from the training distribution."""
    names = [name for name in call.options if not template.reads(name)]
    if attempt.purpose != "session":
        names += [name for name, value in call.sampling.items() if value != TRAINING_DISTRIBUTION[name]]
    return (*call.ignored, *(call.fields.get(name, name) for name in names))


def _own_parameters(turn: Turn, attempt: Attempt) -> dict[str, float]:
    """The agent's own sampling parameters, which count only outside of runs."""
    return turn.call.sampling if attempt.purpose == "session" else {}
