"""Gives a rollout its reward when its verifier is done, before its outcome is written."""

from dataclasses import replace

from harness.async_pool import AsyncPool
from harness.rewards.scorer import RolloutFacts, Scorer, scored
from proxy.pool.completions.store import labelled
from proxy.pool.completions.store import of_attempt as completions_of
from proxy.pool.rollouts.groups import OpenRollout, Outcome
from proxy.pool.rollouts.scoring import ASKED_AGAIN, UNSCORED, Scorable, of_attempt, replaced


async def with_reward(pool: AsyncPool, scorer: Scorer, rollout: OpenRollout, outcome: Outcome) -> Outcome:
    """Return the outcome with the scorer's reward.

    It stays as it is where nothing says how the agent worked: a failure other than a verifier without a verdict.
    """
    if outcome.attempt_id is None or (outcome.reward is None and outcome.failure not in ASKED_AGAIN):
        return outcome
    score = await scored(scorer, await facts_of(pool, rollout, outcome, outcome.attempt_id))
    before = replaced(scorer.name, outcome.reward, outcome.reward_parts, outcome.failure, outcome.detail)
    if score.verdict is None:
        return replace(outcome, reward=None, failure=UNSCORED, detail=score.why, replaced=before)
    rewarded = replace(outcome, reward=score.verdict.reward, reward_parts=dict(score.verdict.parts), replaced=before)
    return replace(rewarded, failure=None, detail="") if outcome.failure in ASKED_AGAIN else rewarded


async def facts_of(pool: AsyncPool, rollout: OpenRollout, outcome: Outcome, attempt_id: int) -> RolloutFacts:
    """Return what is known of a rollout whose outcome is not written yet, with the completions of its attempt."""
    row = Scorable(
        rollout_id=rollout.rollout_id,
        attempt_id=attempt_id,
        task=rollout.task,
        reward=outcome.reward,
        parts=outcome.reward_parts,
        failure=outcome.failure,
        detail=outcome.detail,
        **await pool(of_attempt, attempt_id),
    )
    return RolloutFacts(row, labelled(await pool(completions_of, attempt_id)))
