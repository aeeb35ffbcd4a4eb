"""Shows a run's progress: a live line on a terminal, elsewhere a plain line every PLAIN_SECONDS, and closing tables."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from harness.monitor.rule_metrics import RuleMetrics
from proxy.pool.errors import printable
from proxy.pool.inspect.run_status import Traffic
from proxy.pool.inspect.trainable_calls import ClientCalls
from proxy.pool.rollouts.groups import Outcome, RolloutRow
from proxy.pool.terminal.progress import pace

PLAIN_SECONDS = 10
MAX_ROWS = 40
TOP_REASONS = 3
HACKED = "hacked"
"""Heads the number of rollouts that cheated (harness/integrity)."""
CALLED_OFF = ("redundant", "filtered", "called_off")


def make_console() -> Console:
    """A console for the terminal. Without one its lines are wide, so that nothing is cut in a log."""
    console = Console(markup=False, highlight=False)  # names of tasks may look like markup
    return console if console.is_terminal else Console(width=160, markup=False, highlight=False)


class Rate:
    """Calls and tokens per second since the last `take`."""

    def __init__(self) -> None:
        self._at: float | None = None
        self.last: int | None = None
        self.text = ""

    def take(self, traffic: Traffic) -> None:
        now = time.monotonic()
        if self._at is not None and now > self._at:
            calls, tokens = (count / (now - self._at) for count in (traffic.calls, traffic.tokens))
            self.text = f"{calls:.1f} calls/s, {tokens:.0f} tokens/s"
        self._at, self.last = now, traffic.last


class Board:
    """Counts outcomes as they come and shows them. `rows`: the rollouts so far, when a run is resumed."""

    def __init__(
        self,
        console: Console,
        expected: int | None,
        rows: Sequence[RolloutRow] = (),
        rules: RuleMetrics | None = None,
    ):
        self._console = console
        self._status: Status | None = None
        self._expected = expected
        self._rewards = 0
        self._reward_sum = 0.0
        self._failures: Counter[str] = Counter()
        self._done = 0
        self._began = self._shown = time.monotonic()
        self._alarm = ""
        self.rate = Rate()
        self.rules = rules or RuleMetrics()
        self.running = 0
        self.step: int | None = None
        self.note = ""
        self.outage = ""
        """What the run waits for because it is away: the sandboxes' daemon, or every engine."""
        self.making = ""
        """Which image is pulled or built for it now, and what step."""
        self.beside: tuple[str, Board] | None = None
        """What goes on beside the run, and its own board."""
        for row in rows:
            if row.finished:
                self.add(row)
        self._before = self._done
        """Those of earlier sessions, which say nothing about the rate."""

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(printable(text), soft_wrap=True)

    def alarm(self, text: str) -> None:
        """Print a warning, unless it repeats the last one."""
        if text != self._alarm:
            self._alarm = text
            self.say(f"warning: {text}")

    def add(self, outcome: Outcome | RolloutRow) -> None:
        self._done += 1
        if outcome.reward is not None:
            self._rewards += 1
            self._reward_sum += outcome.reward
        if outcome.failure is not None:
            self._failures[outcome.failure] += 1
        if outcome.hacked is not None:
            self._failures[HACKED] += 1

    @contextmanager
    def live(self) -> Iterator[None]:
        """Show the live line while the block runs."""
        if not self._console.is_terminal:
            yield
            return
        with self._console.status(Text(self.line())) as status:
            self._status = status
            yield

    def refresh(self) -> None:
        if self._status is not None:
            self._status.update(Text(self.line()))
        elif time.monotonic() - self._shown >= PLAIN_SECONDS:
            self._shown = time.monotonic()
            self.say(self.line())

    @property
    def done(self) -> str:
        """How many rollouts have ended; where their number is known, also how many a second, and the rest time."""
        if self._expected is None:
            return f"{self._done} rollouts"
        new, left = self._done - self._before, self._expected - self._done
        rest = pace(new, new + left, time.monotonic() - self._began) if left > 0 else ""
        return f"{self._done}/{self._expected} rollouts{rest and f', {rest}'}"

    def line(self) -> str:
        """One line: how far the run is."""
        parts = [self.done, f"{self.running} running"]
        queued = 0 if self._expected is None else self._expected - self._done - self.running
        if queued > 0:
            parts.append(f"{queued} queued")
        if self._rewards:
            parts.append(f"mean reward {self._reward_sum / self._rewards:.3f} of {self._rewards}")
        parts += [f"{count} {kind}" for kind, count in self._failures.most_common()]
        if self.running and self.rate.text:
            parts.append(self.rate.text)
        if self.step is not None:
            parts.append(f"train step {self.step}")
        if self.beside is not None:
            parts.append(f"{self.beside[0]}: {self.beside[1].done}")
        parts.append(f"{time.monotonic() - self._began:.0f} s")
        parts += [f"waiting: {self.outage}"] * bool(self.outage)
        making = self.making or (self.beside[1].making if self.beside else "")
        return ", ".join([*parts, *filter(None, (making, self.note))])


def closing_table(rows: Sequence[RolloutRow]) -> Table:
    """A table of rollouts per task and agent; with more than MAX_ROWS tasks, one row per agent."""
    many = len({row.task for row in rows}) > MAX_ROWS
    kinds: dict[tuple[str, str], list[RolloutRow]] = defaultdict(list)
    for row in rows:
        if row.finished:
            kinds["all tasks" if many else row.task, row.agent or "-"].append(row)
    agents = {agent for _, agent in kinds}
    if len(agents) > 1 and not many:  # each agent over all its tasks, too
        for row in rows:
            if row.finished:
                kinds["all tasks", row.agent or "-"].append(row)
    table = Table("task", "agent", box=box.SIMPLE)
    for name in ("rollouts", "verdicts", "reward", "calls", "tokens", "s each"):
        table.add_column(name, justify="right")
    table.add_column("remarks")
    for (task, agent), group in kinds.items():
        table.add_row(task, agent, *_cells(group))
    return table


def calls_table(clients: Mapping[str, ClientCalls]) -> Table:
    """A table of model calls per agent, over all attempts: how many can train, and why others cannot."""
    table = Table("agent", box=box.SIMPLE)
    for name in ("calls", "can train", "tokens", "of retried attempts"):
        table.add_column(name, justify="right")
    table.add_column("why others cannot train")
    for name, client in sorted(clients.items()):
        top = client.untrained.most_common(TOP_REASONS)
        rest = client.untrained.total() - sum(count for _, count in top)
        reasons = [f"{count} {why}" for why, count in top] + ([f"{rest} others"] if rest else [])
        share = f"{client.trainable / client.calls:.0%}"
        table.add_row(
            name, str(client.calls), share, str(client.tokens), str(client.retried_tokens), ", ".join(reasons)
        )
    return table


def _cells(rows: Sequence[RolloutRow]) -> list[str]:
    rewards = [row.reward for row in rows if row.reward is not None]
    seconds = [row.seconds for row in rows if row.seconds is not None]
    failures = Counter(row.failure for row in rows if row.failure is not None)
    failures.update(HACKED for row in rows if row.hacked is not None)
    return [
        str(len(rows)),
        str(len(rewards)),
        f"{sum(rewards) / len(rewards):.3f}" if rewards else "missing",
        str(sum(row.completions for row in rows)),
        str(sum(row.sampled_tokens for row in rows)),
        f"{sum(seconds) / len(seconds):.2f}" if seconds else "-",
        ", ".join(f"{count} {kind}" for kind, count in failures.most_common()),
    ]


def length_bias(rows: Sequence[RolloutRow]) -> str | None:
    """Compare the lengths of kept and of cancelled redundant rollouts; None without redundant ones.

    Cancelled rollouts count with the length that they had reached, so they would have been longer still.
    """
    started = [row for row in rows if row.finished and row.attempts]
    off = [row for row in started if row.failure == "redundant"]
    kept = [row for row in started if row.reward is not None]
    if not off or not kept:
        return None
    return f"redundant attempts: kept {_lengths(kept)}; called off {_lengths(off)} when they were ended"


def _lengths(rows: Sequence[RolloutRow]) -> str:
    tokens = sum(row.sampled_tokens for row in rows) / len(rows)
    seconds = sum(row.seconds or 0.0 for row in rows) / len(rows)
    return f"{len(rows)} of {tokens:.0f} tokens and {seconds:.1f} s each"
