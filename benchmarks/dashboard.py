"""Measure the dashboard on a pool of a million completions: how long pages and a search take, and its memory.

Each page is asked for as a browser does, over HTTP, file by file: the first page from a dashboard that has just started
and builds its search index meanwhile; a rollout's page with its tree, messages, tokens and events; searches of frequent
and rare words and of filters, when the index is whole. Figures are the slowest of those asked. Drawing is left out.
Prints one JSON line.
"""

import argparse
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import msgspec
from sqlalchemy import text

from benchmarks.pool import RUN, TASK, fill, finish_group
from proxy.dashboard.app import STATIC
from proxy.pool.database import Pool, open_pool
from proxy.pool.rollouts.attempts import Ending, close_attempt, open_attempt
from proxy.pool.rollouts.groups import Outcome, finish_rollout, open_group
from proxy.pool.rollouts.runs import find_run
from proxy.pool.search.index import place_of
from proxy.pool.training.evaluations import open_evaluation
from proxy.pool.training.fates import StepSums, Tally
from proxy.pool.training.steps import latest

WORDS = 5000
"""Different words of the replies, besides one that stands in all of them."""
ROLLOUTS = 20
EVALUATED = 300
"""Rollouts of the run's evaluation, half of them at trained tasks."""
RUN_PAGE = ("", "/curves", "/rewards", "/evaluations", "/queue", "/account", "/groups")
"""What the page of a run asks of its run."""
CURVES = "names=reward_mean&names=entropy&names=seconds/wait&names=seconds/train&names=staleness_tokens"
"""Those of METRICS that its charts show."""
METRICS = {
    "reward_mean": 0.5,
    "entropy": 1.0,
    "seconds": {"wait": 1.0, "train": 2.0},
    "staleness_tokens": {"0": 9, "1": 3},
    "events": {f"kind_{n}": 0.1 for n in range(24)},
    "command_counts": {f"bash: command-{n}": n for n in range(50)},
    "left_out_by_length": {f"reason/{n}": 0.1 for n in range(100)},
}


def made(url: str, rows: int) -> None:
    """Make a pool with so many completions, with words in their replies and metrics at its steps."""
    pool = open_pool(url)
    run_id = fill(pool, rows)
    _write(pool, rows)
    for _ in range(4):
        finish_group(pool, run_id, "v1", members=8, calls=40, tokens=500)
    open_group(pool, run_id, TASK, 8)
    _evaluate(pool, run_id)
    pool.close()


def _write(pool: Pool, rows: int) -> None:
    sqlite = pool.dialect == "sqlite"
    words = "every word' || (id % :words) || ' word' || (id * 7 % :words) || ' item' || id || '"
    value = f"""'{{"role":"assistant","content":"{words}"}}'"""
    columns = ", ".join(f":{name}" if sqlite else f"cast(:{name} as json)" for name in ("metrics", "so_far"))
    given = {"metrics": METRICS, "so_far": StepSums(Tally(1, 1, 16 * rows)).to_json()}
    with pool.write() as connection:
        reply = value if sqlite else f"cast({value} as json)"
        connection.execute(text(f"update completions set reply = {reply} where id > 0"), {"words": WORDS})
        connection.execute(
            text(f"insert into train_steps (version_id, metrics, so_far) select id, {columns} from policy_versions"),
            {name: msgspec.json.encode(value).decode() for name, value in given.items()},
        )
    if not sqlite:
        with pool.write() as connection:
            connection.execute(text("analyze"))


def _evaluate(pool: Pool, run_id: int) -> None:
    """Evaluate the newest version of the run."""
    version = latest(pool, run_id)
    assert version is not None
    evaluation = open_evaluation(pool, find_run(pool, RUN), version, {}, engine="", rollouts=EVALUATED)
    for number in range(EVALUATED):
        task = TASK | ({"id": f"old-{number}"} if number % 2 else {"id": f"new-{number}", "instruction": f"{number}"})
        [member] = open_group(pool, evaluation.run_id, task, 1)
        attempt, _ = open_attempt(pool, member.rollout_id, "a")
        close_attempt(pool, attempt.id, Ending())
        finish_rollout(pool, member.rollout_id, Outcome(attempt_id=attempt.id, reward=float(number % 3 == 0)))


class Visitor:
    """Somebody who looks at a dashboard."""

    def __init__(self, url: str):
        self._started = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "proxy", "dashboard", url], stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        address = self.process.stdout.readline().removeprefix("open ").strip()
        assert self.process.stdout.readline().startswith("ready: ")
        self.start_s = time.monotonic() - self._started
        self._base, _, self._token = address.partition("/?token=")

    def ask(self, path: str) -> Any:
        sign = "&" if "?" in path else "?"
        with urlopen(f"{self._base}/api/{path}{sign}token={self._token}", timeout=60) as response:
            return msgspec.json.decode(response.read())

    def file(self, name: str) -> None:
        asked = Request(f"{self._base}/{name}", headers={"Authorization": f"Bearer {self._token}"})
        with urlopen(asked, timeout=60) as response:
            response.read()

    def rss_mb(self) -> float:
        """The most memory that the process has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def ms(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def first_page(visitor: Visitor) -> None:
    for path in STATIC.rglob("*"):
        if path.suffix in (".js", ".css", ".html"):
            visitor.file(path.relative_to(STATIC).as_posix())
    visitor.ask("runs")


def run_page(visitor: Visitor) -> None:
    for path in RUN_PAGE:
        visitor.ask(f"runs/{RUN}{path}" + (f"?{CURVES}" if path == "/curves" else ""))


def rollout_page(visitor: Visitor, rollout: int) -> None:
    attempt = visitor.ask(f"rollouts/{rollout}")["shown"]
    visitor.ask(f"attempts/{attempt}")
    call = visitor.ask(f"attempts/{attempt}/calls")["calls"][-1]["id"]
    visitor.ask(f"completions/{call}/conversation")
    visitor.ask(f"completions/{call}/tokens")
    visitor.ask(f"attempts/{attempt}/events")


def searches(rows: int) -> list[str]:
    """A word of every reply, a rarer one, one that stands once, two together, and filters."""
    once = f"item{rows // 2}"
    words = ["every", "word77", once, "every word12", "wor*", f"every {once}"]
    return [
        *(f"q={quote(word)}" for word in words),
        "failure=hung",
        "event=retry_loop",
        f"run={RUN}&least_reward=2",
        "q=every&failure=hung",
    ]


def whole(visitor: Visitor) -> float:
    """Wait until the index has all, and return for how long, in seconds."""
    started = time.monotonic()
    while True:
        state = visitor.ask("search/index")
        if state["trouble"]:
            raise SystemExit(state["trouble"])
        progress = state["progress"]
        if progress and progress["whole"] and progress["outcomes_whole"]:
            return time.monotonic() - started
        time.sleep(1)


def _size(index: Path) -> int:
    return sum(file.stat().st_size for file in index.parent.glob(f"{index.name}*"))


def measured(url: str, rows: int) -> dict[str, Any]:
    """The figures of one dashboard of this pool."""
    visitor = Visitor(url)
    try:
        first = ms(lambda: first_page(visitor))
        draw = random.Random(0)
        rollouts = [*(draw.randint(1, rows) for _ in range(ROLLOUTS)), rows + 1, rows + 20]
        of_run = max(ms(lambda: run_page(visitor)) for _ in range(3))
        while_indexing = max(ms(partial(rollout_page, visitor, id)) for id in rollouts)
        index_s = whole(visitor)
        of_rollout = [ms(partial(rollout_page, visitor, id)) for id in rollouts]
        of_search = {query: ms(partial(visitor.ask, f"search?{query}")) for query in searches(rows)}
        return {
            "start_s": round(visitor.start_s, 2),
            "first_page_ms": round(first, 1),
            "run_page_ms": round(of_run, 1),
            "rollout_page_ms": round(max(of_rollout), 1),
            "rollout_page_while_indexing_ms": round(while_indexing, 1),
            "search_ms": round(max(of_search.values()), 1),
            "searches_ms": {query: round(value, 1) for query, value in of_search.items()},
            "rss_mb": round(visitor.rss_mb(), 1),
            "index_s": round(index_s),
            "index_mb": round(_size(place_of(url)) / 2**20, 1),
        }
    finally:
        visitor.process.terminate()
        visitor.process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="completions, rollouts and groups")
    parser.add_argument("--url", help="an empty PostgreSQL database; default: a SQLite file")
    parser.add_argument("--quick", action="store_true", help="few rows")
    parser.add_argument("--out", type=Path, help="file for the figures")
    options = parser.parse_args()
    rows = 2000 if options.quick else options.rows
    with tempfile.TemporaryDirectory() as directory:
        url = options.url or f"sqlite:///{directory}/pool.db"
        started = time.monotonic()
        made(url, rows)
        filled = time.monotonic() - started
        figures = {
            "date": date.today().isoformat(),
            "command": " ".join(["benchmarks/dashboard.py", *sys.argv[1:]]),
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "load_average": os.getloadavg()[0],
            "database": url.partition(":")[0].partition("+")[0],
            "rows": rows,
            "fill_s": round(filled, 1),
        } | measured(url, rows)
    line = msgspec.json.encode(figures)
    if options.out:
        options.out.write_bytes(msgspec.json.format(line) + b"\n")
    print(line.decode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
