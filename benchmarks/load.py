"""The benchmark's load generator: agents that send calls to one server, in a process of their own.

Takes one job as JSON and prints its result as JSON. CPU time is that of the server's process, all threads, user and
system, read from the kernel's clock of that process.
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
"""Words of the system prompt, of a task and of a tool's result; with the tiny tokenizer 1k tokens of prompt."""
FIRST_NAME, LAST_NAME = 1000, 4000
"""Calls are named to the engine by max_tokens: below what makes the gateway stream from the engine by itself."""


class LoadJob(msgspec.Struct, kw_only=True):
    """What to send. `kind`: calls | conversations | streams."""

    kind: str
    url: str
    path: str
    pid: int
    engine: str
    concurrency: int
    calls: int = 0
    """calls: how many in all, the first `warm` of them unmeasured; `per_key` of them with one key."""
    warm: int = 0
    per_key: int = 20
    turns: int = 0
    """conversations: turns in all, CPU time is measured over the last `measured`."""
    measured: int = 0
    slow_turns: int = 0
    """Turns after these, with an engine that takes its time; latency is measured over them."""
    rounds: int = 1
    """streams: how many each agent reads after another."""
    body: dict[str, Any] | None = None
    """streams: the request, where it is none of chat completions."""


class LoadGenerator:
    """One job: a client, names for calls, the server's clock."""

    def __init__(self, job: LoadJob, http: aiohttp.ClientSession):
        self.job = job
        self.http = http
        self.system = {"role": "system", "content": words(SYSTEM_WORDS, "system")}
        self._names: Iterator[int] = count()

    def cpu(self) -> float:
        """CPU seconds that the server's process has used."""
        return time.clock_gettime(~self.job.pid << 3 | 2)  # CLOCK_PROCESS_CPUTIME_ID of another process, as the C
        # library's clock_getcpuclockid makes it

    def rss(self) -> float:
        """Resident memory of the server, MB."""
        status = Path(f"/proc/{self.job.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def name(self) -> int:
        return FIRST_NAME + next(self._names) % (LAST_NAME - FIRST_NAME)

    @asynccontextmanager
    async def post(self, key: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        url, data = self.job.url + self.job.path, msgspec.json.encode(body)
        async with self.http.post(url, data=data, headers=headers) as answer:
            if answer.status != 200:
                raise SystemExit(f"HTTP {answer.status}: {(await answer.text())[:500]}")
            yield answer

    async def ask(self, key: str, messages: list[dict[str, Any]], name: int, **fields: Any) -> dict[str, Any]:
        """One call that is not streamed; the assistant's message."""
        body = {"model": "tiny", "messages": messages, "max_tokens": name, **fields}
        async with self.post(key, body) as answer:
            return dict(msgspec.json.decode(await answer.read())["choices"][0]["message"])

    async def times(self) -> dict[int, dict[str, float]]:
        """When the engine received and answered the calls since this was asked last."""
        async with self.http.get(f"{self.job.engine}/times") as answer:
            return {int(name): times for name, times in msgspec.json.decode(await answer.read()).items()}

    async def mode(self, **mode: Any) -> None:
        async with self.http.post(f"{self.job.engine}/mode", data=msgspec.json.encode(mode)):
            pass


async def calls(load: LoadGenerator) -> dict[str, Any]:
    """Independent calls of about 1k tokens: the same system prompt, another task each."""
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
    """One agent: its history grows by what is sampled and by a tool's result, turn by turn."""

    def __init__(self, load: LoadGenerator, number: int):
        self._load = load
        self._key = f"conversation-{number}"
        self._messages = [load.system, {"role": "user", "content": words(TASK_WORDS, number)}]
        self._number = number

    async def turn(self) -> tuple[int, float]:
        """The name of the call and the seconds that it took."""
        name, started = self._load.name(), time.monotonic()
        message = await self._load.ask(self._key, self._messages, name, tools=[TOOL])
        seconds = time.monotonic() - started
        self._messages.append(message)
        for call in message["tool_calls"]:
            result = words(RESULT_WORDS, (self._number, len(self._messages)))
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
        return name, seconds


async def conversations(load: LoadGenerator) -> dict[str, Any]:
    """Growing conversations side by side; then some turns more with a slow engine, for latency."""
    job, agents = load.job, [Conversation(load, number) for number in range(load.job.concurrency)]
    await load.mode(kind="turn")

    async def turns(agent: Conversation, number: int) -> list[tuple[int, float]]:
        return [await agent.turn() for _ in range(number)]

    async def slowly(agent: Conversation, wait: float) -> list[tuple[int, float]]:
        await asyncio.sleep(wait)  # all at one moment would measure one queue of 64 calls, not 64 conversations
        return await turns(agent, job.slow_turns)

    before = load.cpu()
    await asyncio.gather(*[turns(agent, job.turns - job.measured) for agent in agents])
    cpu, started = load.cpu(), time.monotonic()
    await asyncio.gather(*[turns(agent, job.measured) for agent in agents])
    done, seconds, end = job.measured * len(agents), time.monotonic() - started, load.cpu()
    found: dict[str, Any] = {"rss_mb": load.rss()}
    if job.measured:
        found |= {"cpu_ms": (end - cpu) / done * 1e3, "turns_per_s": done / seconds}
        found["cpu_ms_mean"] = (end - before) / job.turns / len(agents) * 1e3
    if job.slow_turns:
        await load.mode(kind="turn", seconds=1.0)
        await load.times()
        print("measuring", flush=True)
        lines = await asyncio.gather(*[slowly(agent, i / len(agents)) for i, agent in enumerate(agents)])
        took = [pair for line in lines for pair in line]
        engine = await load.times()
        found["added_ms"] = [(s - engine[n]["last"] + engine[n]["received"]) * 1e3 for n, s in took]
    return found


async def streams(load: LoadGenerator) -> dict[str, Any]:
    """Streams side by side, one engine event per token."""
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
        "first_byte_ms": [(at - engine[name]["first"]) * 1e3 for name, at in first.items()],
    }


async def _together(number: int, work: Callable[[int], Awaitable[Any]]) -> list[Any]:
    return list(await asyncio.gather(*[work(i) for i in range(number)]))


KINDS = {"calls": calls, "conversations": conversations, "streams": streams}


async def run(job: LoadJob) -> dict[str, Any]:
    """The result of one job."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        return await KINDS[job.kind](LoadGenerator(job, http))


if __name__ == "__main__":
    print(msgspec.json.encode(asyncio.run(run(msgspec.json.decode(sys.argv[1], type=LoadJob)))).decode())
