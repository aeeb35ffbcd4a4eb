"""The gateway benchmark's load generator: agents that send calls to one server, in their own process.

Takes one job as JSON and prints its result as JSON. CPU time is that of the server's process (all threads, user and
system), read from the kernel's clock of that process.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from benchmarks.answers import TOOL, words

SYSTEM_WORDS, TASK_WORDS, RESULT_WORDS = 430, 40, 52
"""Words in the system prompt, a task and a tool's result. With the tiny tokenizer, a prompt has about 1k tokens."""
FIRST_NAME, LAST_NAME = 1000, 4000
"""The engine tells calls apart by max_tokens. All are below the value from which the gateway streams by itself."""


class LoadJob(msgspec.Struct, kw_only=True):
    """What to send. `kind`: calls | conversations | streams."""

    kind: str
    url: str
    path: str
    pid: int
    engine: str
    concurrency: int
    calls: int = 0
    """calls: the number of calls, of which the first `warm` are not measured; `per_key` share a key."""
    warm: int = 0
    per_key: int = 20
    turns: int = 0
    """conversations: the number of turns; CPU time is measured over the last `measured`."""
    measured: int = 0
    slow_turns: int = 0
    """conversations: further turns with an engine that takes time; latency is measured over these."""
    rounds: int = 1
    """streams: how many streams each agent reads, one after the other."""
    body: dict[str, Any] | None = None
    """streams: the request body, if it is not one of chat completions."""


class LoadGenerator:
    """One job: an HTTP client, names for calls, and the server's clock."""

    def __init__(self, job: LoadJob, http: aiohttp.ClientSession):
        self.job = job
        self.http = http
        self.system = {"role": "system", "content": words(SYSTEM_WORDS, "system")}
        self._names: Iterator[int] = count()

    def cpu(self) -> float:
        """CPU seconds that the server's process has used."""
        # the id of another process's CPU clock, computed as glibc's clock_getcpuclockid does
        return time.clock_gettime(~self.job.pid << 3 | 2)

    def rss(self) -> float:
        """Resident memory of the server in MiB."""
        status = Path(f"/proc/{self.job.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def name(self) -> int:
        """A number that names the next call to the engine, as its max_tokens."""
        return FIRST_NAME + next(self._names) % (LAST_NAME - FIRST_NAME)

    @asynccontextmanager
    async def post(self, key: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """POST a request; raises SystemExit unless the status is 200."""
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        url, data = self.job.url + self.job.path, msgspec.json.encode(body)
        async with self.http.post(url, data=data, headers=headers) as answer:
            if answer.status != 200:
                raise SystemExit(f"HTTP {answer.status}: {(await answer.text())[:500]}")
            yield answer

    async def ask(self, key: str, messages: list[dict[str, Any]], name: int, **fields: Any) -> dict[str, Any]:
        """Make one call without streaming; returns the assistant's message."""
        body = {"model": "tiny", "messages": messages, "max_tokens": name, **fields}
        async with self.post(key, body) as answer:
            return dict(msgspec.json.decode(await answer.read())["choices"][0]["message"])

    async def times(self) -> dict[int, dict[str, float]]:
        """When the engine received and answered each call since the last time this was asked."""
        async with self.http.get(f"{self.job.engine}/times") as answer:
            return {int(name): times for name, times in msgspec.json.decode(await answer.read()).items()}

    async def mode(self, **mode: Any) -> None:
        """Set how the engine answers (`AnswerMode`)."""
        async with self.http.post(f"{self.job.engine}/mode", data=msgspec.json.encode(mode)):
            pass


async def calls(load: LoadGenerator) -> dict[str, Any]:
    """Independent calls of about 1k tokens: the same system prompt, a different task each."""
    job, numbers, started = load.job, iter(range(load.job.calls)), 0.0
    cpu = rss = 0.0
    await load.mode(kind="short")

    async def agent() -> None:
        nonlocal cpu, rss, started
        for number in numbers:
            if number == job.warm:
                cpu, rss, started = load.cpu(), load.rss(), time.monotonic()
            task = {"role": "user", "content": words(TASK_WORDS, number)}
            await load.ask(f"calls-{number // job.per_key}", [load.system, task], load.name())

    await _together(job.concurrency, lambda _: agent())
    measured, seconds = job.calls - job.warm, time.monotonic() - started
    return {
        "cpu_ms": (load.cpu() - cpu) / measured * 1e3,
        "calls_per_s": measured / seconds,
        "rss_growth_mb": load.rss() - rss,
        "rss_mb": load.rss(),
    }


class Conversation:
    """One agent. Its history grows by what is sampled and by a tool's result, turn by turn."""

    def __init__(self, load: LoadGenerator, number: int):
        self._load = load
        self._key = f"conversation-{number}"
        self._messages = [load.system, {"role": "user", "content": words(TASK_WORDS, number)}]
        self._number = number

    async def turn(self) -> tuple[int, float]:
        """Take one turn; returns the name of the call and the seconds that it took."""
        name, started = self._load.name(), time.monotonic()
        message = await self._load.ask(self._key, self._messages, name, tools=[TOOL])
        seconds = time.monotonic() - started
        self._messages.append(message)
        for call in message["tool_calls"]:
            result = words(RESULT_WORDS, (self._number, len(self._messages)))
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return name, seconds


async def conversations(load: LoadGenerator) -> dict[str, Any]:
    """Growing conversations side by side; then some turns with a slow engine, for latency."""
    job, agents = load.job, [Conversation(load, number) for number in range(load.job.concurrency)]
    await load.mode(kind="turn")

    async def turns(agent: Conversation, number: int) -> list[tuple[int, float]]:
        return [await agent.turn() for _ in range(number)]

    async def slowly(agent: Conversation, wait: float) -> list[tuple[int, float]]:
        await asyncio.sleep(wait)  # spread the agents: 64 calls at one moment would measure their queue
        return await turns(agent, job.slow_turns)

    before = load.cpu()
    await asyncio.gather(*[turns(agent, job.turns - job.measured) for agent in agents])
    cpu, started = load.cpu(), time.monotonic()
    await asyncio.gather(*[turns(agent, job.measured) for agent in agents])
    measured_turns, seconds, end = job.measured * len(agents), time.monotonic() - started, load.cpu()
    figures: dict[str, Any] = {"rss_mb": load.rss()}
    if job.measured:
        figures |= {"cpu_ms": (end - cpu) / measured_turns * 1e3, "turns_per_s": measured_turns / seconds}
        figures["cpu_ms_mean"] = (end - before) / job.turns / len(agents) * 1e3
    if job.slow_turns:
        await load.mode(kind="turn", seconds=1.0)
        await load.times()
        print("measuring", flush=True)
        lines = await asyncio.gather(*[slowly(agent, i / len(agents)) for i, agent in enumerate(agents)])
        named_seconds = [pair for line in lines for pair in line]
        engine = await load.times()
        figures["added_ms"] = [(s - engine[n]["last"] + engine[n]["received"]) * 1e3 for n, s in named_seconds]
    return figures


async def streams(load: LoadGenerator) -> dict[str, Any]:
    """Concurrent streams, with one engine event per token."""
    job = load.job
    first: dict[int, float] = {}
    await load.mode(kind="stream", pace=0.02)
    await load.times()

    async def agent(number: int) -> int:
        sent = 0
        for round in range(job.rounds):
            await asyncio.sleep(0.02 * number / job.concurrency if round == 0 else 0)
            name = load.name()
            task = {"role": "user", "content": words(TASK_WORDS, (number, round))}
            body = {"messages": [load.system, task], "max_tokens": name, "stream": True}
            if job.body is not None:
                body = {**job.body, "sampling_params": {"max_new_tokens": name}}
            async with load.post(f"stream-{number}", body) as answer:
                async for chunk in answer.content.iter_any():
                    first.setdefault(name, time.monotonic())
                    sent += chunk.count(b"data: ")
        return sent

    cpu = load.cpu()
    received = sum(await _together(job.concurrency, agent))
    used, engine = load.cpu() - cpu, await load.times()
    return {
        "cpu_s": used,
        "received": received,
        "streams": len(first),
        "first_byte_ms": [(arrived - engine[name]["first"]) * 1e3 for name, arrived in first.items()],
    }


async def _together(number: int, work: Callable[[int], Awaitable[Any]]) -> list[Any]:
    """Run `work` for 0 to number - 1 at the same time."""
    return list(await asyncio.gather(*[work(i) for i in range(number)]))


KINDS = {"calls": calls, "conversations": conversations, "streams": streams}


async def run(job: LoadJob) -> dict[str, Any]:
    """Run one job and return its result."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        return await KINDS[job.kind](LoadGenerator(job, http))


if __name__ == "__main__":
    print(msgspec.json.encode(asyncio.run(run(msgspec.json.decode(sys.argv[1], type=LoadJob)))).decode())
