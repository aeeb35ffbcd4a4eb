"""Asks one judge one question, and reads its answer strictly. Nothing that a judge does raises more than NoScore.

Each question is one request. Chat models are reached through litellm, which is imported when it is needed, as that
takes seconds; reward models by a POST to /classify. Left out: several questions in one request.
"""

import asyncio
import math
import os
import re
from importlib import import_module
from typing import Any

import aiohttp

from harness.rewards.judge_file import JudgeModel
from harness.verdict.judge import JUDGE_JSON, with_backslashes
from proxy.pool.errors import UserError
from proxy.pool.schema import storable

TRIES = 3
PAUSE_SECONDS = 2.0
"""Pause before the second try; each further pause is four times as long."""
SECONDS = 300.0
MAX_TEXT = 300
_ANSWER = re.compile(r"(?:\A|</think>)\s*+(?=\{|```)")


class NoScore(Exception):
    """The judge gave no score; the message says why in one sentence."""


async def ask(model: JudgeModel, key: str, messages: list[dict[str, str]]) -> tuple[float, str]:
    """Return a judge's score and its reason; NoScore when it gives none in some tries."""
    for number in range(TRIES):
        if number:
            await asyncio.sleep(PAUSE_SECONDS * 4 ** (number - 1))
        try:
            async with asyncio.timeout(SECONDS):
                return await (_classified if model.answers == "classify" else _answered)(model, key, messages)
        except TimeoutError:
            trouble = f"gives no answer within {SECONDS:g} s"
        except NoScore as error:
            trouble = str(error)
    raise NoScore(f"the judge {model.model} {trouble}")


def read_answer(text: str) -> tuple[float, str] | None:
    """Read {"score": 0 to 1, "reason": "..."}, alone or in one code fence. Anything else, or more, is no answer.

    Reasoning that a model writes before its answer is skipped: up to the first </think> that an object follows. An
    answer that begins the text has none before it, so what its reason quotes is not taken for the answer.
    """
    begin = _ANSWER.search(text)
    if begin is None:
        return None
    text = text[begin.end() :].strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text.partition("\n")[2][:-3]
    try:
        answer = JUDGE_JSON.decode(with_backslashes(text))
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or not {"score"} <= answer.keys() <= {"score", "reason"}:
        return None
    score = answer["score"]
    if not isinstance(score, float) or not 0 <= score <= 1:
        return None
    reason = str(answer.get("reason") or "")[:MAX_TEXT]
    # A reason may quote an agent's lone surrogates. They are replaced, as refusing the answer would spare that agent.
    return score, storable(reason)


async def _answered(model: JudgeModel, key: str, messages: list[dict[str, str]]) -> tuple[float, str]:
    options: dict[str, Any] = {"api_key": key} if key else {}
    name = model.model
    if model.url:
        options |= {"api_base": model.url, "api_key": key or "none"}
        name = name if name.startswith("openai/") else f"openai/{name}"
    try:
        answer = await libraries().acompletion(
            model=name, messages=messages, temperature=0, timeout=SECONDS, num_retries=0, max_retries=0, **options
        )
        text = answer.model_dump()["choices"][0]["message"].get("content") or ""
    except Exception as error:  # litellm raises its providers' errors, and some that nobody has classified
        raise NoScore(f"gives no answer ({type(error).__name__}: {str(error)[:MAX_TEXT]})") from error
    if (read := read_answer(text)) is None:
        raise NoScore(f"gives an answer that is no score: {text[-MAX_TEXT:]!r}")
    return read


async def _classified(model: JudgeModel, key: str, messages: list[dict[str, str]]) -> tuple[float, str]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": model.model, "input": "\n\n".join(message["content"] for message in messages)}
    try:
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{model.url.rstrip('/')}/classify", json=body, headers=headers) as reply,
        ):
            if reply.status != 200:
                raise NoScore(f"answers {reply.status}: {(await reply.text())[:MAX_TEXT]}")
            score = float((await reply.json())["data"][0]["probs"][-1])
    except (aiohttp.ClientError, ValueError, LookupError, TypeError) as error:
        raise NoScore(f"gives no class ({type(error).__name__}: {str(error)[:MAX_TEXT]})") from error
    if not math.isfinite(score):
        raise NoScore(f"gives no finite number: {score}")
    return score, ""


def libraries() -> Any:
    """Import litellm and return it. UserError when it is not installed."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it fetches nothing
    try:
        litellm: Any = import_module("litellm")
    except ImportError as error:
        raise UserError(
            "judges are asked through litellm, which is not installed; pip install 'blackforge[providers]'"
        ) from error
    litellm.suppress_debug_info = True
    return litellm
