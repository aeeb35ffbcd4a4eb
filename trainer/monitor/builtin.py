"""The rules that every run has. They only tell; a rule of the same name in the configuration replaces one.

Their bounds are constants: each is a value from the literature, or one that healthy runs stay far below.
"""

from dataclasses import dataclass
from typing import Literal

from trainer.config.monitor import Rule

Concern = Literal["liveness", "optimisation", "advice"]
CONCERNS: tuple[Concern, ...] = ("liveness", "optimisation", "advice")
"""Concerns in the order in which rules are reported and acted upon. Advice is given only where nothing is alarmed."""


@dataclass(frozen=True)
class WatchedRule:
    """A rule, and what it means when its bound is broken."""

    rule: Rule
    concern: Concern = "optimisation"
    meaning: str = ""


LOST = "lost_tokens"


def _built_in(name: str, figure: str, above: float, concern: Concern, meaning: str) -> WatchedRule:
    return WatchedRule(Rule(name=name, figure=figure, above=above, steps=1), concern, meaning)


BUILT_IN: dict[str, WatchedRule] = {
    watched.rule.name: watched
    for watched in (
        _built_in(  # the longest phase of at least SLOW_SECONDS, over its median (trainer/monitor/liveness.py)
            "slow_phase", "slow_phase", 6, "liveness", "a phase takes far longer than before; see seconds"
        ),
        # share of the attempts that ended since the step before and failed by no fault of the policy
        _built_in("aborts", "abort_share", 0.05, "liveness", "attempts fail; see results.jsonl, `proxy pool events`"),
        # share of the step's groups whose rewards are all equal
        _built_in(
            "equal_groups", "equal_group_share", 0.5, "liveness", "the tasks are too easy or too hard to tell rollouts "
            "apart"
        ),
        # with batch.refill: share of the groups since the step before that were skipped for equal rewards
        _built_in(
            "skipped_groups", "skipped_group_share", 0.5, "liveness", "most sampling is for groups that teach nothing, "
            "and the rest are few tasks; change the tasks"
        ),
        # share of the step's rollouts whose last turn was cut, at a token limit or because it repeated itself
        _built_in(
            "truncated_rollouts", "truncated_share", 0.25, "liveness", "agents are cut off at the context's or the "
            "answer's limit, or for repeating themselves; raise the limit, or see loss.negative_longest"
        ),
        _built_in(
            LOST, LOST, 0, "liveness", "sampled tokens are neither trained nor excluded, which is a bug in the trainer"
        ),
        # p99 of the lengths of rollouts below their group's mean reward, over that of those above (ROLL)
        _built_in(
            "length_ratio", "length_ratio", 1.5, "optimisation", "failed rollouts are long, so long contexts are "
            "pushed down; see loss.negative_longest"
        ),
        # share of the gradient norm, in the steps that report.negative_gradient_every measures (ROLL)
        _built_in(
            "negative_gradient_share", "negative_gradient_share", 0.7, "optimisation", "the step mostly pushes tokens "
            "down; see loss.negative_weight"
        ),
        # share of sum |w A|, in every step: stands in for the share of the gradient where that is not measured
        _built_in(
            "negative_weight_share", "negative_weight_share", 0.7, "optimisation", "the step's weights mostly push "
            "tokens down; see loss.negative_weight"
        ),
        # KL(rollout || policy) per token: engine mismatch and staleness together; runs were reported to collapse there
        _built_in(
            "kl_rollout", "kl_rollout", 0.013, "optimisation", "trainer and engine disagree, or the rollouts are too "
            "stale; see kl_fresh and `trainer logprobs`"
        ),
        # share of trained tokens whose probability differs by more than twice from the rollout's (F(2), 2510.11370)
        _built_in(
            "extreme_tokens", "extreme_tokens", 0.1, "optimisation", "many logprobs are far from those that the engine "
            "reported; see kl_fresh and `trainer logprobs`"
        ),
        # share of trained tokens whose weight is not their ratio
        _built_in(
            "clip_fraction", "clip_fraction", 0.45, "optimisation", "the loss clips a large part of the tokens; see "
            "kl_rollout and batch.max_staleness"
        ),
        # share of sampled tokens whose recorded logprob is not finite
        _built_in(
            "impossible_tokens", "impossible_token_share", 0.001, "optimisation", "the engine reports logprobs that no "
            "sampled token can have; see the sampling parameters"
        ),
        # share of sampled tokens whose paths are longer than batch.max_tokens
        _built_in(
            "too_long_tokens", "too_long_token_share", 0.01, "optimisation", "the longest rollouts are not learned "
            "from to their end; raise batch.max_tokens"
        ),
        # with batch.schedule = greedy: share of the step's groups that are as stale as batch.max_staleness allows
        _built_in(
            "stale_groups", "stale_group_share", 0.5, "optimisation", "rollouts come too late and will be dropped; add "
            "engines or choose another batch.schedule"
        ),
        # share of the step's seconds in which the trainer waited for rollouts
        _built_in(
            "waiting", "wait_share", 0.5, "advice", "the trainer mostly waits for rollouts; add engines, or let more "
            "rollouts run at once"
        ),
    )
}  # fmt: skip


def watched_rules(own: tuple[Rule, ...], silent: tuple[str, ...]) -> list[WatchedRule]:
    """Return the rules of a run, in the order of CONCERNS. `silent`: names of built-in rules that are left out."""
    rules = {name: watched for name, watched in BUILT_IN.items() if name not in silent}
    for rule in own:
        known = BUILT_IN.get(rule.name, WatchedRule(rule))
        rules[rule.name] = WatchedRule(rule, known.concern, known.meaning)
    return sorted(rules.values(), key=lambda watched: CONCERNS.index(watched.concern))
