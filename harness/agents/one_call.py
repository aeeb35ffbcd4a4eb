"""The one-call agent of the domains `reasoning` and `qa`: the instruction goes to the model, and its answer is checked.

It has no sandbox and no tools; the attempt's key and the proxy are those of any agent. Left out: a system prompt, since
a task's instruction says all that is to be said, and a second try, since a call that the engine breaks off is a failure
of the attempt, which is run again.
"""

import asyncio
import time

from harness.agents.base import Bundle, Endpoint, Launch
from harness.tasks import Task
from harness.verdict.chat_client import ChatModel, NoAnswer, complete
from proxy.pool.errors import UserError
from sandboxes.base import Result

AGENT = "one-call"
"""Its name in the pool, whatever agent the run has for tasks in sandboxes."""


class OneCall:
    """The agent of a run that has no tasks for another."""

    name = AGENT
    bundle = None

    def check(self) -> None:
        """There is nothing to install."""

    def launch(self, endpoint: Endpoint, bundle: Bundle) -> Launch:
        raise UserError(f"the agent {AGENT!r} answers questions and works in no sandbox; name another with --agent")


async def ask(endpoint: Endpoint, task: Task, seconds: float) -> Result:
    """The answer, as the end of an agent: `exit` with code 1 and the reason when there is none, or `timeout`."""
    began = time.monotonic()
    model = ChatModel(endpoint.url, endpoint.model, endpoint.key)
    messages = [{"role": "user", "content": task.instruction}]
    try:
        async with asyncio.timeout(seconds):
            text = await complete(model, messages, seconds + 1)
    except TimeoutError:
        return Result("timeout", -1, "", 0, time.monotonic() - began)
    except NoAnswer as error:
        return Result("exit", 1, str(error), 0, time.monotonic() - began)
    return Result("exit", 0, text, 0, time.monotonic() - began)
