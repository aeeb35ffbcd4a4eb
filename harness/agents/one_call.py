"""The built-in agent of the domains `reasoning` and `qa`: sends the instruction to the model and returns its answer.

It has no sandbox and no tools, but an attempt's key and the proxy like any agent. Left out: a system prompt, since the
instruction says everything, and retries, since a failed call fails the attempt, which is run again.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from harness.agents.base import NO_MCP, Bundle, Endpoint, Launch
from harness.tasks import Task
from harness.tasks.schema import McpServer
from harness.verdict.chat_client import ChatModel, NoAnswer, complete
from proxy.pool.errors import UserError
from proxy.pool.rollouts.prompt_variations import PromptKind
from sandboxes.base import Result
from sandboxes.clocks import time_up

AGENT = "one-call"
"""Its name in the pool, whichever agent works on the run's tasks in sandboxes."""


class OneCall:
    """The adapter of the built-in agent, for runs that name no other."""

    mcp = NO_MCP
    name = AGENT
    bundle = None
    fixed: frozenset[PromptKind] = frozenset()

    def check(self) -> None:
        """Nothing to check: it is built in."""

    def launch(self, endpoint: Endpoint, bundle: Bundle, servers: Sequence[McpServer]) -> Launch:
        raise UserError(f"the agent {AGENT!r} cannot work in a sandbox; name another one with --agent")


async def ask(endpoint: Endpoint, task: Task, seconds: float, excused: Callable[[], Awaitable[float]]) -> Result:
    """Ask the model. Returns the answer as an agent's Result: exit code 1 with the reason on failure, or `timeout`.

    `excused` says how many seconds do not count.
    """
    began = time.monotonic()
    model = ChatModel(endpoint.url, endpoint.model, endpoint.key)
    messages = [{"role": "user", "content": task.instruction}]
    asking = asyncio.create_task(complete(model, messages, None))
    timing = asyncio.create_task(time_up(seconds, excused))
    try:
        await asyncio.wait({asking, timing}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            return Result("timeout", -1, "", 0, time.monotonic() - began)
        text = asking.result()
    except NoAnswer as error:
        return Result("exit", 1, str(error), 0, time.monotonic() - began)
    finally:
        asking.cancel()
        timing.cancel()
        await asyncio.gather(asking, timing, return_exceptions=True)
    return Result("exit", 0, text, 0, time.monotonic() - began)
