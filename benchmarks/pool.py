"""Measure what the scheduler of a large pool costs: polls of an idle run, and a lease among many finished groups.

Fills a pool with the rows of a long run, and then asks as trainer and harness ask. CPU time is that of this process: on
SQLite all of it, on PostgreSQL (--url) without the server's. Prints one JSON line.
"""

import argparse
import os
import platform
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any
from zlib import crc32

import msgspec
from sqlalchemy import insert, text

from proxy.pool.completions.records import NewCompletion, VersionSpan, int_bytes
from proxy.pool.completions.store import to_row
from proxy.pool.database import Pool, open_pool
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import admission, open_run, set_queue_limit
from proxy.pool.schema import completions, groups, tasks
from proxy.pool.training.places import tallies
from proxy.pool.training.settled import keep
from proxy.pool.training.steps import latest, mark_pushed
from proxy.pool.training.windowed_fifo import LeaseRule, lease

BATCH = 64
"""Groups per step of the old rows."""
TASK = {"id": "old", "instruction": "do it", "domain": "agent"}
TASKS = 1000
POLLS = 200
RUN = "long"

OLD = {
    "policy_versions": """insert into policy_versions (run_id, step, checkpoint, hf_dir, created_at, pushed_at)
        select :run, n - 1, 'c', 'h', n, n from numbers where n <= 1 + :rows / 64""",
    # one in 20 is held out, one in 1000 was lost, and the next one replaces it
    "groups": """insert into groups (id, run_id, queue_index, position, task_id, size, state, step, purpose, failure,
            replaces, created_at, finished_at, settled)
        select n, :run, n - 1, case when n % 20 = 7 then null else n - 1 end, :task + n % 1000, 1,
            case when n % 20 = 7 then 'DONE' when n % 1000 = 0 then 'TOMBSTONE' else 'CONSUMED' end,
            case when n % 20 = 7 or n % 1000 = 0 then null else 1 + (n - 1) / 64 end,
            case when n % 20 = 7 then 'eval' end, case when n % 1000 = 0 then 'hung' end,
            case when n % 1000 = 1 and n > 1 then n - 1 end, n, n, 1
        from numbers""",
    "rollouts": """insert into rollouts (id, group_id, member, attempt_id, reward, failure, finished_at)
        select n, n, 0, n, case when n % 1000 = 0 then null else 1.0 end,
            case when n % 1000 = 0 then 'hung' end, n from numbers""",
    "attempts": """insert into attempts (id, run_id, rollout_id, number, key_hash, agent, opened_at, closed_at,
            sampled_tokens)
        select n, :run, n, 0, 'old-' || n, 'a', n, n, 16 from numbers""",
    "completions": """insert into completions (id, attempt_id, ordinal, prefix_length, prompt_tail, sampled, logprobs,
            versions, finish_reason, reply, path_crc, started_at, finished_at)
        select n, n, 0, 0, prompt_tail, sampled, logprobs, '[["v1", 0, 2]]', 'stop', reply, 0, n, n
        from numbers, (select * from completions where id = 0) as pattern""",
}
NUMBERS = {
    "sqlite": "(with recursive n(n) as (select 1 union all select n + 1 from n where n < :rows) select n from n)",
    "postgresql": "(select cast(generate_series(1, :rows) as integer) as n)",
}


def fill(pool: Pool, rows: int) -> int:
    """Make a run with this many trained groups, each of one rollout with one completion; return the id of the run."""
    run = open_run(pool, RUN, "train", {})
    set_queue_limit(pool, run.id, 4 * BATCH)
    with pool.write() as connection:
        task = [{"run_id": run.id, "name": f"old-{n}", "domain": "agent", "spec": TASK} for n in range(TASKS)]
        connection.execute(insert(tasks), task)
        first = connection.execute(text("select min(id) from tasks")).scalar_one()
        connection.execute(
            text(
                "insert into attempts (id, number, key_hash, agent, opened_at, closed_at) values (0, 0, '', 'a', 0, 0)"
            )
        )
        connection.execute(insert(completions).values(to_row(completion(0, 16)) | {"id": 0, "ordinal": 0}))
        given = {"run": run.id, "task": first, "rows": rows}
        for table, statement in OLD.items():
            numbered = statement.replace("from numbers", f"from {NUMBERS[pool.dialect]} as numbers")
            names = {name: value for name, value in given.items() if f":{name}" in numbered}
            connection.execute(text(numbered), names)
            if pool.dialect == "postgresql" and table != "policy_versions":
                connection.execute(text(f"select setval('{table}_id_seq', (select max(id) from {table}))"))
    if pool.dialect == "postgresql":  # what its autovacuum does by itself; SQLite gathers no statistics
        with pool.write() as connection:
            connection.execute(text("analyze"))
    with pool.write() as connection:  # what its steps would have done
        keep(connection, run.id, tallies(connection, run.id, groups.c.settled == 1))
    version = latest(pool, run.id)
    assert version is not None
    mark_pushed(pool, version)
    return run.id


def completion(attempt_id: int, tokens: int, version: str = "v1") -> NewCompletion:
    """A trainable completion with this many tokens of prompt and as many of answer."""
    ids = array("i", range(tokens))
    return NewCompletion(
        attempt_id=attempt_id,
        prompt_tail=ids,
        sampled=ids,
        logprobs=array("f", [-0.5] * tokens),
        versions=(VersionSpan(version, 0, tokens),),
        finish_reason="stop",
        reply={"role": "assistant", "content": "ok"},
        path_crc=crc32(int_bytes([*ids, *ids])),
        started_at=time.time(),
        finished_at=time.time(),
    )


def finish_group(pool: Pool, run_id: int, version: str, members: int, calls: int, tokens: int) -> None:
    """Open a group whose rollouts each make some calls and get a reward."""
    for member in open_group(pool, run_id, TASK, members):
        attempt, _ = open_attempt(pool, member.rollout_id, "a")
        row = to_row(completion(attempt.id, tokens, version))
        with pool.write() as connection:
            connection.execute(insert(completions), [row | {"ordinal": ordinal} for ordinal in range(calls)])
        close_attempt(pool, attempt.id, Ending())
        finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=float(member.member % 2)))


def cpu_seconds(work: Callable[[], Any], times: int = 1) -> float:
    """CPU time of this process for one call, as the mean of several."""
    started = time.process_time()
    for _ in range(times):
        work()
    return (time.process_time() - started) / times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="groups, rollouts, attempts and completions")
    parser.add_argument("--finished", type=int, default=256, help="finished groups among which a lease chooses 8")
    parser.add_argument("--url", help="an empty PostgreSQL database; default: a SQLite file")
    parser.add_argument("--quick", action="store_true", help="few rows")
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args()
    rows, finished = (1000, 8) if options.quick else (options.rows, options.finished)
    with tempfile.TemporaryDirectory() as directory:
        pool = open_pool(options.url or str(Path(directory) / "pool.db"))
        started = time.monotonic()
        run_id = fill(pool, rows)
        filled = time.monotonic() - started
        version = latest(pool, run_id)
        assert version is not None
        step, rule = version.step + 1, LeaseRule(groups=8, window=8, max_staleness=1)
        open_group(pool, run_id, TASK, 8)
        lease(pool, run_id, step, rule), admission(pool, run_id)  # the first calls build their statements
        idle_lease = cpu_seconds(lambda: lease(pool, run_id, step, rule), POLLS)
        idle_admission = cpu_seconds(lambda: admission(pool, run_id), POLLS)
        for _ in range(finished):
            finish_group(pool, run_id, version.name, members=8, calls=8, tokens=500)
        finish = cpu_seconds(lambda: finish_group(pool, run_id, version.name, members=8, calls=8, tokens=500)) / 8
        wide = LeaseRule(groups=8, window=2 * finished, max_staleness=1)
        leased = cpu_seconds(lambda: lease(pool, run_id, step, wide))
        assert lease(pool, run_id, step, wide) is not None
        pool.close()
    figures = {
        "date": date.today().isoformat(),
        "command": " ".join(["benchmarks/pool.py", *sys.argv[1:]]),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load_average": os.getloadavg()[0],
        "database": pool.dialect,
        "rows": rows,
        "finished_groups": finished,
        "fill_s": round(filled, 1),
        "idle_lease_cpu_ms": 1000 * idle_lease,
        "idle_admission_cpu_ms": 1000 * idle_admission,
        "rollout_cpu_ms": 1000 * finish,
        "lease_cpu_s": leased,
    }
    line = msgspec.json.encode(figures)
    if options.out:
        options.out.write_bytes(msgspec.json.format(line) + b"\n")
    print(line.decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
