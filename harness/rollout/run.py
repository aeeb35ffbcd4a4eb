"""Makes attempts until one comes to an outcome, each with a fresh sandbox and a key of its own.

A failed rollout is data: its classified failure goes into its row (proxy/pool/rollouts/failures.py). What no rollout
could survive (an agent that is not installed, a proxy that is gone, a pool that refuses writes) ends the run instead,
and the rollout stays open.
"""

import asyncio

from harness.agents.base import Agent
from harness.rewards.at_verdict import with_reward
from harness.rollout.attempt import make_attempt
from harness.rollout.context import Cancellation, RolloutJob, RunContext
from harness.tasks.stored import stored_task
from proxy.pool.errors import UserError
from proxy.pool.rollouts.failures import treatment
from proxy.pool.rollouts.groups import GroupProgress, OpenRollout, Outcome, finish_rollout

TRIES = 3
OUTAGES = 10
"""How often a rollout runs again after an outage: an agent that could cause one would try again for ever."""


async def run_rollout(
    context: RunContext, rollout: OpenRollout, agent: Agent, cancellation: Cancellation | None = None
) -> tuple[Outcome, GroupProgress]:
    """Bring a rollout to its outcome and write it. UserError when no rollout could succeed at present."""
    job = RolloutJob(rollout, stored_task(rollout.task), agent, cancellation or Cancellation())
    tries = outages = 0
    while True:
        outcome = await (context.remote_attempt or make_attempt)(context, job)
        if outcome.failure == "outage" and outages < OUTAGES:
            outages += 1
            continue
        tries += 1
        if outcome.failure is None or treatment(outcome.failure) != "retry" or tries == TRIES:
            break
        await asyncio.sleep(context.pause_seconds * 4 ** (tries - 1))
    if outcome.failure in ("proxy", "engine") and (trouble := await context.trouble()):
        raise UserError(f"{trouble.detail}; bring it back and repeat the same command to go on")
    if context.scorer is not None:
        outcome = await with_reward(context.pool, context.scorer, rollout, outcome)
    if context.integrity is not None:
        outcome = await context.integrity.judged(context.pool, rollout, outcome)
    return outcome, await context.pool(finish_rollout, rollout.rollout_id, outcome)
