"""What a user's function said about the rollouts of a lease: asked once, stored, and read with the lease from then on.

So a step that is leased again is the same, whatever the function or its name has become meanwhile. Left out: how its
answers act on the batch (proxy/pool/training/windowed_fifo.py, trainer/data/assemble.py).
"""

import sys
from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, select, update

from proxy.pool.completions.records import Completion
from proxy.pool.database import Pool, retried
from proxy.pool.errors import UserError
from proxy.pool.functions.process import FunctionProcess, Weighed
from proxy.pool.processes.owners import demand_trainer
from proxy.pool.rollouts.runs import lock_run
from proxy.pool.schema import groups, rollouts
from proxy.pool.training.windowed_fifo import Lease, LeasedGroup, LeasedRollout

HUNG = 8
"""Calls of one step that may take too long, before the step ends with an error instead of waiting for hundreds."""


def weigh(pool: Pool, run_id: int, lease: Lease, name: str, trainer: str | None = None) -> bool:
    """Ask the function about each rollout of a lease that has a verdict, and store the answers.

    Returns whether it asked: a lease that has answers keeps them. UserError when the function failed on all of them,
    or takes too long again and again; then nothing is stored, and the groups stay leased.
    """
    leased = (groups.c.run_id == run_id) & (groups.c.step == lease.step) & (groups.c.state == "LEASED")
    with pool.read() as connection:
        query = select(func.count()).where(leased, groups.c.function.is_(None))
        if not connection.scalar(query):
            return False
    answers = _ask(name, lease.groups)
    _store(pool, run_id, lease.step, name, answers, trainer)
    return True


def _ask(name: str, leased: Sequence[LeasedGroup]) -> dict[int, Weighed]:
    answers: dict[int, Weighed] = {}
    hung = 0
    with FunctionProcess(name) as function:
        for group in leased:
            for member in group.rollouts:
                if member.verdict is None:
                    continue
                answers[member.rollout_id] = weighed = function.weigh(rollout_fields(group, member))
                hung += weighed.error.startswith("took longer")
                if weighed.error:
                    detail = weighed.detail and f" ({weighed.detail})"
                    text = (
                        f"warning: {name} {weighed.error}{detail} for rollout {member.rollout_id}, which is set aside"
                    )
                    print(text, file=sys.stderr, flush=True)
                if hung == HUNG:
                    raise UserError(_useless(name, f"{weighed.error} for {HUNG} rollouts"))
    if answers and all(weighed.error for weighed in answers.values()):
        errors = {weighed.error: weighed.detail for weighed in answers.values()}
        error, detail = next(iter(errors.items()))
        raise UserError(_useless(name, f"{error}{detail and f' ({detail})'} for every rollout"))
    return answers


def _useless(name: str, what: str) -> str:
    return f"batch.function = {name} {what}; correct it and start again, and the step takes the same groups"


def rollout_fields(group: LeasedGroup, member: LeasedRollout) -> dict[str, Any]:
    """Return what a function gets of a rollout (docs/training.md lists it)."""
    return {
        "rollout": member.rollout_id,
        "group": group.queue_index,
        "member": member.member,
        "task": group.task,
        "reward": member.reward,
        "parts": dict(member.parts),
        "group_rewards": [other.verdict for other in group.rollouts],
        "staleness": member.staleness,
        "completions": [_completion_fields(item) for item in member.completions],
    }


def _completion_fields(item: Completion) -> dict[str, Any]:
    return {
        "id": item.id,
        "label": item.label,
        "finish_reason": item.finish_reason,
        "prompt_length": item.prompt_length,
        "sampled": item.sampled.tolist(),
        "logprobs": item.logprobs.tolist(),
        "versions": [[span.version, span.start, span.end] for span in item.versions],
        "untrainable": None if item.untrainable is None else str(item.untrainable),
        "message": item.reply,
    }


@retried
def _store(pool: Pool, run_id: int, step: int, name: str, answers: dict[int, Weighed], trainer: str | None) -> None:
    leased = (groups.c.run_id == run_id) & (groups.c.step == step) & (groups.c.state == "LEASED")
    with pool.write() as connection:
        lock_run(connection, run_id)
        demand_trainer(connection, run_id, trainer)
        connection.execute(update(groups).where(leased).values(function=name))
        for rollout_id, weighed in answers.items():
            aside = None if weighed.weight else f"{name} {weighed.error}".strip()
            values = {
                "weight": weighed.weight,
                "set_aside": aside,
                "completions_left_out": list(weighed.leave_out) or None,
            }
            connection.execute(update(rollouts).where(rollouts.c.id == rollout_id).values(values))
