"""A user's reward function, by its import path: `function(task, verdict, rollout)` in a limited process."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from harness.rewards.scorer import VERIFIER, RolloutFacts, Score
from harness.verdict.rewards import Verdict
from proxy.pool.functions.process import FunctionProcess


class RewardFunction:
    """Calls the function, one rollout at a time. UserError when it cannot be imported."""

    def __init__(self, name: str):
        self.name = name
        self._process = FunctionProcess(name, "reward", "reward")
        self._thread = ThreadPoolExecutor(1, "reward")  # the process ends with the thread that started it
        self._thread.submit(self._process.__enter__).result()

    async def score(self, facts: RolloutFacts) -> Score:
        """Return what the function says. A number alone keeps the parts of the verifier's reward."""
        data = (dict(facts.task), facts.verdict_data(), facts.rollout_data())
        answer = await asyncio.get_running_loop().run_in_executor(self._thread, self._process.call, *data)
        if "error" in answer:
            detail = f" ({answer['detail']})" if answer.get("detail") else ""
            return Score(None, f"the reward function {self.name} {answer['error']}{detail}")
        if answer["reward"] is None:
            return Score(None, f"the reward function {self.name} gave no reward")
        verdict = facts.verdict
        parts = answer["parts"] if answer["parts"] is not None else dict(verdict.parts) if verdict else {}
        known = {} if verdict is None else {VERIFIER: verdict.reward}
        return Score(Verdict(answer["reward"], known | parts))

    async def close(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self._process.__exit__, None, None, None)
        self._thread.shutdown()
