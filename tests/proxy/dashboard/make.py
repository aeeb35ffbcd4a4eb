"""A pool to look at: a train run with steps, an evaluation, a rollout with tools, sub-agents, hostile texts, files."""

import json
import os
import time
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from sqlalchemy import insert, update

from proxy.pool.completions import observed
from proxy.pool.completions.observed import Observed, ToolResult
from proxy.pool.completions.records import NewCompletion, VersionSpan, int_bytes
from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, insert_row
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import note_lease, open_run, set_queue_limit
from proxy.pool.schema import attempts, completions
from proxy.pool.training.fates import CompletionFate, RolloutFate
from proxy.pool.training.interventions import Cause, pause
from proxy.pool.training.steps import Published, mark_pushed
from proxy.pool.training.windowed_fifo import LeaseRule, lease
from tests.pool.make import publish_next

HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">",
    "\u202etxet desrever\u202c and \x1b[31mred\x1b[0m and a \x07 bell",
    "\ufffd\ufffd lone \ud800 half",
    "x" * 1_000_000,
    "</pre></details><b>bold</b> &amp; {{7*7}} ${7*7} javascript:alert(1)",
)
"""Texts that a page must show as they are."""
TASK = {"id": "mend <b>the parser</b>", "instruction": "Mend the parser.\n" + HOSTILE[0], "domain": "agent"}


def metrics(step: int, alarm: bool = False) -> dict[str, Any]:
    """Metrics of a step, of the shapes that the trainer publishes."""
    level = "alarm" if alarm else "ok"
    return {
        "reward_mean": 0.2 + 0.01 * step,
        "reward_by_domain": {"agent": 0.2 + 0.01 * step, "math": 0.5},
        "entropy": 1.5 / step,
        "kl_rollout": 0.001 * step,
        "grad_norm": float("nan") if step == 2 else 1.0,
        "clip_fraction": 0.01,
        "staleness_tokens": {"0": 30, "1": 10},
        "seconds": {"wait": 3.0, "prepare": 0.5, "train": 8.0, "checkpoint": 1.0, "report": 0.1, "push": 2.0},
        "behaviour": {"turns": 3.0, "failure_rate": 0.25},
        "events": {"tool_called": 4.0, "retry_loop": 0.5},
        "tool_failure_rate": {"bash": 0.25},
        "command_counts": {"bash: ls": 4},
        "alarms": ["kl_rollout"] if alarm else [],
        "monitor": {"kl_rollout": 2 if alarm else 0, "waiting": 2 if alarm else 0},
        "monitor_states": {
            "kl_rollout": {"level": level, "since": step if alarm else 0, "value": 0.02},
            "waiting": {"level": level, "since": step if alarm else 0, "value": 0.7},
        },
        "left_out_so_far": {"stale": [1, 2, 3]},
    }


@dataclass
class Work:
    """The calls of one attempt, each of which goes on from the one before unless it says otherwise."""

    pool: Pool
    attempt_id: int
    version: str = "v1"
    ids: list[int] = field(default_factory=list)
    paths: dict[int, "array[int]"] = field(default_factory=dict)
    clock: float = field(default_factory=lambda: time.time() - 600)
    began: float = field(default_factory=lambda: time.time() - 603)

    def call(
        self,
        reply: dict[str, Any],
        results: tuple[ToolResult, ...] = (),
        after: int | None = -1,
        label: str | None = None,
        prompt: int = 5,
        sampled: int = 6,
        **more: Any,
    ) -> int:
        """Record a call. `after`: the call that it follows; -1: the last one; None: none."""
        before = (self.ids[-1] if self.ids else None) if after == -1 else after
        start = len(self.paths[before]) if before is not None else 0
        tail = array("i", range(100 + start, 100 + start + prompt))
        answer = array("i", range(500 + start, 500 + start + sampled))
        path = (self.paths[before] if before is not None else array("i")) + tail + answer
        item = NewCompletion(
            attempt_id=self.attempt_id,
            prefix_of=before,
            prefix_length=start,
            follows=before,
            prompt_tail=tail,
            sampled=answer,
            logprobs=array("f", [-0.25 * (n + 1) for n in range(sampled)]),
            versions=(VersionSpan(self.version, 0, sampled),),
            finish_reason="tool_calls" if reply.get("tool_calls") else "stop",
            reply={"role": "assistant"} | reply,
            path_crc=crc32(int_bytes(path)),
            started_at=self.clock + 2,
            finished_at=self.clock + 5,
            queued_seconds=0.5 if self.ids else None,
            observed=Observed(results=results),
        )
        row = to_row(item) | {"ordinal": len(self.ids)} | more
        if any("\ud800" in result.head for result in results):
            row["observed"] = observed.pack(Observed(results=results))
        with self.pool.write() as connection:
            id = insert_row(connection, completions, row)
            if label is not None:
                connection.execute(update(completions).where(completions.c.id == id).values(label=label))
        self.clock += 5
        self.ids.append(id)
        self.paths[id] = path
        return id


def tool(name: str, arguments: dict[str, Any], id: str = "c1") -> dict[str, Any]:
    """A tool call of a reply."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def result(text: str, call: str = "c1", name: str = "bash", error: bool = False) -> ToolResult:
    """A tool's result, cut as the proxy cuts it."""
    head, tail = observed.cut(text, 8192)
    return ToolResult(call, name, head, tail, len(text), error)


@dataclass(frozen=True)
class Story:
    """Ids of what the pool holds."""

    run: str
    run_id: int
    evaluation: str
    group: int
    rollouts: list[int]
    attempt: int
    calls: list[int]
    session: int
    open_group: int


def story(pool: Pool, checkpoints: str = "/nowhere/checkpoints", steps: int = 3) -> Story:
    """Fill a pool."""
    run = open_run(pool, "train", "train", {"seed": 1, "sandbox": "process"})
    set_queue_limit(pool, run.id, 4)
    note_lease(pool, run.id, 1, 2)
    publish_next(
        pool, run.id, Published(step=0, checkpoint=f"{checkpoints}/step-000000", hf_dir="/nowhere/0", metrics={})
    )
    members = open_group(pool, run.id, TASK, 2)
    work = _attempt(pool, members[0].rollout_id)
    _finish(pool, members[0].rollout_id, work, 1.0, {"tests": 1.0, "style": 0.5, "<i>part</i>": -0.25})
    other = Work(pool, open_attempt(pool, members[1].rollout_id, "scaffold")[0].id)
    other.call({"content": "I give up."}, label="main")
    _finish(pool, members[1].rollout_id, other, None, {}, "verifier", HOSTILE[1])
    for step in range(1, steps + 1):
        more = open_group(pool, run.id, TASK | {"id": f"task {step}"}, 2)
        for place, member in enumerate(more):
            own = Work(pool, open_attempt(pool, member.rollout_id, "scaffold")[0].id)
            own.call({"content": f"Done {step}."}, label="main")
            _finish(pool, member.rollout_id, own, float(place), {})
        leased = lease(pool, run.id, step, LeaseRule(groups=1, window=4, max_staleness=99))
        assert leased is not None
        fates = [
            RolloutFate(
                group.group_id,
                each.rollout_id,
                each.untrained,
                [CompletionFate(item.id, len(item.sampled), {}) for item in each.completions],
            )
            for group in leased.groups
            for each in group.rollouts
        ]
        done = Published(
            step=step, checkpoint=f"{checkpoints}/step-{step:06d}", hf_dir=f"/nowhere/{step}",
            metrics=metrics(step, alarm=step == steps), fates=fates,
        )  # fmt: skip
        mark_pushed(pool, publish_next(pool, run.id, done))
    running = open_group(pool, run.id, TASK | {"id": "runs still"}, 2)
    Work(pool, open_attempt(pool, running[0].rollout_id, "scaffold")[0].id).call({"content": "I look."})
    pause(pool, run.id, Cause("kl_rollout", "0.02 is above 0.013"))
    evaluation = open_run(pool, "held out/1", "eval", {})
    for reward in (0.0, 1.0, None):
        [member] = open_group(pool, evaluation.id, TASK | {"id": f"q{reward}"}, 1)
        own = Work(pool, open_attempt(pool, member.rollout_id, "scaffold")[0].id)
        own.call({"content": "42"}, label="main")
        _finish(pool, member.rollout_id, own, reward, {}, None if reward is not None else "agent_crash")
    with pool.write() as connection:
        values = {"number": 0, "key_hash": "session", "agent": "session", "opened_at": time.time()}
        session = insert_row(connection, attempts, values)
    Work(pool, session).call({"content": "hello"})
    return Story(
        run="train",
        run_id=run.id,
        evaluation="held out/1",
        group=members[0].group_id,
        rollouts=[member.rollout_id for member in members],
        attempt=work.attempt_id,
        calls=work.ids,
        session=session,
        open_group=running[0].group_id,
    )


def _attempt(pool: Pool, rollout_id: int) -> Work:
    """An attempt with tools, a sub-agent, a side call, a retry loop, and texts that would like to be HTML."""
    work = Work(pool, open_attempt(pool, rollout_id, "scaffold")[0].id)
    first = work.call(
        {"reasoning_content": HOSTILE[4], "content": HOSTILE[0], "tool_calls": [tool("bash", {"command": "make"})]},
        label="main", prompt=300,
    )  # fmt: skip
    for _ in range(3):
        work.call(
            {"content": "", "tool_calls": [tool("bash", {"command": "make"})]},
            (result("make: *** No rule to make target 'test'.  Stop.", error=True),),
            label="main",
        )
    shown = (HOSTILE[3], HOSTILE[2], HOSTILE[0], HOSTILE[1])
    results = tuple(result(text, f"c{number}") for number, text in enumerate(shown, 1))
    work.call({"content": HOSTILE[3]}, results, label="main")
    work.call({"content": "a title"}, after=None, label="side")
    work.call({"content": "I am a sub-agent. " + HOSTILE[1]}, after=None, label="subagent")
    work.call({"content": "Another branch."}, after=first, label="main", finish_reason="length")
    return work


def _finish(
    pool: Pool,
    rollout_id: int,
    work: Work,
    reward: float | None,
    parts: dict[str, float],
    failure: str | None = None,
    detail: str = "",
) -> None:
    ending = Ending(failure=failure, detail=detail, exit_code=0, timings={"setup": 1.5, "agent": 30.0, "total": 32.0})
    close_attempt(pool, work.attempt_id, ending)
    times = {"opened_at": work.began, "closed_at": work.clock + 4}
    with pool.write() as connection:
        connection.execute(update(attempts).where(attempts.c.id == work.attempt_id).values(times))
    outcome = Outcome(
        attempt_id=work.attempt_id, reward=reward, failure=failure, detail=detail, reward_parts=parts
    )  # fmt: skip
    finish_rollout(pool, rollout_id, outcome)


def hostile_log(file: Path, attempt: int) -> int:
    """Write what an attempt's agent printed, beside a pool: markup, escapes, no UTF-8, a line of 1 MB. Its bytes."""
    (file.parent / "logs").mkdir()
    (file.parent / "whereabouts.json").write_text(json.dumps({"pool": f"sqlite:///{file}", "name": "train"}))
    log = file.parent / "logs" / f"attempt-{attempt}.log"
    lines = (HOSTILE[0].encode(), HOSTILE[1].encode(), b"bad \xff\xfe bytes", HOSTILE[3].encode(), b"the \xff end")
    return log.write_bytes(b"\n".join(lines))


def many_calls(pool: Pool, attempt_id: int, count: int) -> None:
    """Add calls without a prefix to an attempt."""
    row = to_row(
        NewCompletion(
            attempt_id=attempt_id, prompt_tail=array("i", [1, 2]), sampled=array("i", [3, 4]),
            logprobs=array("f", [-0.5, -0.5]), versions=(VersionSpan("v1", 0, 2),), finish_reason="stop",
            reply={"role": "assistant", "content": "ok"}, path_crc=crc32(int_bytes([1, 2, 3, 4])),
            started_at=1.0, finished_at=2.0,
        )
    )  # fmt: skip
    with pool.write() as connection:
        connection.execute(insert(completions), [row | {"ordinal": ordinal} for ordinal in range(count)])


def plant(file: Path, kind: str) -> None:
    """Put something else in the place of a file, which keeps its content where it can."""
    real = file.rename(file.with_name("elsewhere"))
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "huge":
        file.write_bytes(real.read_bytes() + b" " * 2_000_000)
    else:
        file.symlink_to(real if kind == "link" else "/dev/zero")
