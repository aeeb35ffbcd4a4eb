"""Decides from a task's trials whether it can be trusted for training.

verdict              an oracle trial reaches full reward, a no-op does not, every time
-------------------  -------------------------------------------------------------------------------------------------
accepted             yes
no solution          there is no oracle solution, so nothing can be tested
oracle fails         the oracle solution never reaches full reward
no-op passes         doing nothing always reaches full reward
flaky                the same trial came to different rewards, or only sometimes to one
environment broken   image, set-up or sandbox fail, or the verifier gives no verdict on an untouched environment
weak test            a judge thinks that the tests let wrong work pass (harness/verdict/judge.py); the cause says why

Beside its verdict a finding says where the task is verified, where else it could be, what an agent can do to a verdict
in its own sandbox, and whether code that does no work earns the whole reward.

Left out: how hard a task is, and whether its instruction mentions everything that its tests check.
"""

import hashlib
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

from harness.tasks import Task, parts_of
from harness.tasks.where import verified_fresh
from harness.validation.trials import Kind, Trial
from harness.verdict.judge import Opinion
from harness.verdict.shared import not_stopped

FULL = 1.0
"""The reward that an oracle solution must reach."""
KINDS: tuple[Kind, ...] = ("oracle", "no-op")
Word = Literal["accepted", "no solution", "oracle fails", "no-op passes", "flaky", "environment broken", "weak test"]
VERDICTS: tuple[Word, ...] = get_args(Word)
PLACES = {
    "could be fresh": "Verified in the agent's sandbox, and with the same verdicts in a fresh one: set verifier.where",
    "shared only": "Verified in the agent's sandbox, and only there the oracle solution passes",
    "should be shared": "Verified in a fresh sandbox, but the oracle solution passes in the agent's only: name what is "
    "missing in verifier.artifacts, or set verifier.where = 'shared'",
}
"""What the other place of verification says about a task -> the heading of such tasks in the report."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One line of report.jsonl."""

    id: str
    verdict: Word
    cause: str = ""
    """One sentence. For an accepted task empty, or what is not known of it: a judge's opinion, what code could buy."""
    oracle: list[float | None] = []
    """Rewards of the oracle trials; null for a trial without a reward. `noop` is the same for no-op trials."""
    noop: list[float | None] = []
    where: str = ""
    """fresh or shared: where the task is verified."""
    place: str = ""
    """One of PLACES, or empty."""
    not_stopped: list[str] = []
    """What an agent can do to the verdict, if it is reached in the agent's sandbox."""
    bought_by: list[str] = []
    """Programs of the solution that could be replaced by ones without work, for the whole reward."""
    opinion: Opinion | None = None
    seconds: float = 0.0
    """Duration of the longest trial."""


def key_of(task: Task) -> str:
    """The task's id and a digest of its fields and its directories' content."""
    return f"{task.id} {hashlib.sha256(msgspec.json.encode(task)).hexdigest()[:16]}"


def why_untried(task: Task) -> str:
    """Say why no trial can test this task; empty when trials can."""
    if task.domain != "agent":
        return f"a task of domain {task.domain!r} has no oracle; only tasks of domain 'agent' are tried"
    missing = [part.name for part in parts_of(task) if part.task.solution is None]
    if not missing:
        return ""
    return f"step {missing[0]!r} has no solution" if task.steps else "the task has no solution"


def finding(task: Task, trials: Sequence[Trial], sandboxes: str, opinion: Opinion | None = None) -> Finding:
    """Decide on a task by its trials in sandboxes of this kind, and by a judge's opinion if there is one."""
    elsewhere = [trial for trial in trials if trial.where]
    hollow = [trial for trial in trials if trial.kind == "hollow"]
    trials = [trial for trial in trials if trial not in elsewhere and trial not in hollow]
    plain = [trial for trial in sorted(trials, key=lambda trial: trial.number) if not trial.variation]
    rewards = {kind: [trial.reward for trial in plain if trial.kind == kind] for kind in KINDS}
    fresh = all(verified_fresh(part.task, sandboxes) for part in parts_of(task))
    word, cause = _verdict(task, plain, rewards)
    if word == "accepted":
        word, cause = _under_variations(trials)
    if word == "accepted" and opinion is not None:
        if opinion.weak:
            word, cause = "weak test", "; ".join(opinion.reasons) or "the judge gives no reason"
        elif opinion.weak is None:
            cause = f"the judge has no opinion: {opinion.trouble}"
    untried = [trial for trial in hollow if trial.failure == "environment"]
    if word == "accepted" and untried:
        unknown = f"not tried whether code without work earns as much: {untried[0].detail}"
        cause = "; ".join(filter(None, [cause, unknown]))
    return Finding(
        id=task.id,
        verdict=word,
        cause=cause,
        oracle=rewards["oracle"],
        noop=rewards["no-op"],
        where="fresh" if fresh else "shared",
        place=_place(fresh, plain, elsewhere),
        not_stopped=list(not_stopped(task, sandboxes).values()),
        bought_by=[
            path for trial in hollow if trial.reward is not None and trial.reward >= FULL for path in trial.replaced
        ],
        opinion=opinion,
        seconds=max((trial.seconds for trial in trials), default=0.0),
    )


def _place(fresh: bool, here: Sequence[Trial], elsewhere: Sequence[Trial]) -> str:
    """What the trials at the other place say; empty when nothing, or when none were made."""
    if not elsewhere:
        return ""
    if fresh:
        return "should be shared" if _passes(elsewhere) and not _passes(here) else ""
    if not _passes(here):
        return ""
    return "could be fresh" if _passes(elsewhere) else "shared only"


def _passes(trials: Sequence[Trial]) -> bool:
    """Whether each oracle solution reaches the whole reward, and doing nothing never does."""
    return all(trial.reward is not None and (trial.reward >= FULL) == (trial.kind == "oracle") for trial in trials)


def _verdict(task: Task, trials: Sequence[Trial], rewards: dict[Kind, list[float | None]]) -> tuple[Word, str]:
    if missing := why_untried(task):
        return "no solution", missing
    details = {kind: next((t.detail for t in trials if t.kind == kind and t.detail), "") for kind in KINDS}
    if all(trial.failure == "environment" for trial in trials):
        return "environment broken", details["oracle"] or details["no-op"]
    for kind in KINDS:
        if len(set(rewards[kind])) > 1:
            return "flaky", f"{kind}: {_listed(rewards[kind])}{_after(details[kind])}"
    oracle, noop = rewards["oracle"][0], rewards["no-op"][0]
    if oracle is None or oracle < FULL:
        return "oracle fails", f"its reward is {_listed([oracle])}{_after(details['oracle'])}"
    if noop is None:
        return "environment broken", f"no verdict on an untouched environment{_after(details['no-op'])}"
    if noop >= FULL:
        return "no-op passes", f"doing nothing has reward {noop:g}"
    return "accepted", ""


def _under_variations(trials: Sequence[Trial]) -> tuple[Word, str]:
    for trial in trials:
        if trial.variation and trial.failure == "environment":
            return "environment broken", f"with {trial.variation}: {trial.detail[-300:].strip()}"
        if trial.variation and (trial.reward is None or trial.reward < FULL):
            return (
                "oracle fails",
                f"with {trial.variation}, its reward is {_listed([trial.reward])}{_after(trial.detail)}",
            )
    return "accepted", ""


def _listed(rewards: Sequence[float | None]) -> str:
    return ", ".join("none" if reward is None else f"{reward:g}" for reward in rewards)


def _after(detail: str) -> str:
    return f" ({detail[-300:].strip()})" if detail else ""
